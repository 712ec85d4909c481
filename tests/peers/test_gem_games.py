"""GEM's environments through ours: the same answers and rewards as GEM's own, and trained in with two env runners."""

from __future__ import annotations

import pytest
from seeded_games import check_in_another_process, check_seeded, make

from trial_envs.errors import GeneratorSettingError, MissingDataError

pytestmark = pytest.mark.peers

ENV_ID = "trial/GEM-v0"
GAMES = {
    "game:GuessTheNumber-v0-easy": ["\\boxed{5}", "\\boxed{5}", "\\boxed{99}", "\\boxed{7}"],
    "game:GuessTheNumber-v0-random": ["\\boxed{12}", "\\boxed{20}", "\\boxed{30}", "30"],
    "game:Mastermind-v0-easy": ["\\boxed{1 2}", "\\boxed{3 4}", "\\boxed{5 6}", "nothing"],
    "game:Minesweeper-v0-easy": ["\\boxed{reveal 1 1}", "\\boxed{flag 0 0}", "\\boxed{reveal 4 4}"],
    "game:TowerofHanoi-v0-easy": ["\\boxed{A C}", "\\boxed{A B}", "\\boxed{C B}", "\\boxed{B B}"],
    "game:Game2048-v0-easy": ["\\boxed{up}", "\\boxed{left}", "\\boxed{down}", "\\boxed{right}"] * 5,
    "game:FifteenPuzzle-v0-easy": ["\\boxed{up}", "\\boxed{left}", "\\boxed{down}"],
    "game:Sudoku-v0-easy": ["\\boxed{1 1 1}", "\\boxed{2 2 3}"],
    "rg:chain_sum": ["\\boxed{5}"],
}


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("seed", [0, 2_000_017])
def test_an_environment_is_gems_own(game, seed):
    gem = pytest.importorskip("gem")
    own, env = gem.make(game), make(ENV_ID, {"game": game})
    task, told = own.reset(seed=seed)  # from here on it draws from the process's own generators
    observation, info = env.reset(options={"task": f"{game}/{seed}"})
    assert info["task"] == task.strip()
    assert observation == (told.get("suffix", "").strip() or task.strip())
    total = 0.0
    for action in GAMES[game]:
        observation, *answer, info = env.step(action)
        shown, reward, terminated, truncated, _ = own.step(action)
        total += reward
        assert observation.startswith(shown.strip())
        assert answer == [pytest.approx(reward), terminated or truncated, False]
        assert info["score"] == pytest.approx(max(0.0, min(1.0, total)))
        if terminated or truncated:
            break
    env.close()


@pytest.mark.parametrize("game", GAMES)
def test_an_environment_is_a_pure_function_of_its_id(game):
    check_seeded(ENV_ID, {"game": game}, [f"{game}/3", f"{game}/1000004"], GAMES[game])


def test_environments_are_the_same_in_another_process():
    check_in_another_process([(ENV_ID, {"game": game}, f"{game}/7", actions) for game, actions in GAMES.items()])


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"game": "game:Chess"}, GeneratorSettingError, "no environment 'game:Chess'"),
        ({"game": "game:Wordle-v0-easy"}, MissingDataError, "nltk.downloader"),
    ],
)
def test_what_cannot_be_played_is_refused(settings, error, told):
    with pytest.raises(error, match=told):
        make(ENV_ID, settings).reset(seed=0)
