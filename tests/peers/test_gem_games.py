"""``trial/GEM-v0``: the answers and rewards are those of GEM's own environments."""

from __future__ import annotations

import pytest
from seeded_games import check_games, make

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
    task, details = own.reset(seed=seed)  # from here on, GEM draws from the global generators
    observation, info = env.reset(options={"task": f"{game}/{seed}"})
    assert info["task"] == task.strip()
    assert observation == (details.get("suffix", "").strip() or task.strip())
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


def test_a_game_is_a_pure_function_of_its_id():
    check_games(ENV_ID, "game", GAMES)


@pytest.mark.parametrize(
    ("settings", "error", "cause"),
    [
        ({"game": "game:Chess"}, GeneratorSettingError, "no environment 'game:Chess'"),
        ({"game": "game:Wordle-v0-easy"}, MissingDataError, "nltk.downloader"),
    ],
)
def test_what_cannot_be_played_is_refused(settings, error, cause):
    with pytest.raises(error, match=cause):
        make(ENV_ID, settings).reset(seed=0)
