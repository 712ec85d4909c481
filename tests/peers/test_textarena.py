"""``trial/TextArena-v0``: games, answers and rewards are those of TextArena itself."""

from __future__ import annotations

from typing import Any

import pytest
from seeded_games import check_games, make

from trial_envs.errors import GeneratorSettingError, MissingDataError

pytestmark = pytest.mark.peers

ENV_ID = "trial/TextArena-v0"
GAMES = {
    "GuessTheNumber-v0": ["[10]", "[10]", "what?", "4", "[15]", "[3]", "[17]", "[12]", "[6]", "[1]", "[20]", "[9]"],
    "FrozenLake-v0": ["down", "[right]", "[d]", "down", "up up", "[right]", "right", "[down]", "[down]"],
    "2048-v0-ultra-easy": ["[up]", "[left]", "[down]", "[right]"] * 6,
    "Bandit-v0": ["[red]", "[blue]", "[pink]", "[red]", "[green]"] * 3,
    "Mastermind-v0": ["[1 2 3 4]", "[5 6 1 2]", "[1 1 2 3]", "[4 3 2 1]"],
    "Minesweeper-v0-small": ["[1 1]", "[3 4]", "[5 5]", "[flag 0 0]"],
    "Blackjack-v0": ["[hit]", "[stand]", "[hit]", "[hit]"] * 3,
    "TowerOfHanoi-v0": ["[A B]", "[A C]", "[B C]", "[A B]", "[C C]"],
    "Sudoku-v0-easy": ["[1 1 5]", "[2 3 4]"],
    "ThreeCardMonte-v0": ["[0]"],
}


def played_directly(game: str, seed: int, actions: list[str], **game_args: Any) -> list[tuple[str, float, bool]]:
    """Return texts, rewards and ends of TextArena's own loop, without the wrappers that repeat earlier messages."""
    ta = pytest.importorskip("textarena")
    env = ta.make(f"{game}-raw", **game_args)
    env = ta.wrappers.ActionFormattingWrapper(env)
    env.reset(num_players=1, seed=seed)
    answers = []
    for action in [None, *actions]:
        done = False
        if action is not None:
            done, _ = env.step(action=action)
        _, messages = env.get_observation()
        kinds = (ta.ObservationType.PROMPT, ta.ObservationType.PLAYER_ACTION)
        shown = "\n".join(text.strip() for _, text, kind in messages if kind not in kinds).strip()
        if not done:
            answers.append((shown, 0.0, False))
            continue
        rewards, info = env.close()
        answers.append((f"{shown}\n{info[0]['reason']}".strip(), float(rewards[0]), True))
        break
    return answers


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("seed", [0, 2_000_017])
def test_a_game_is_textarenas_own(game, seed):
    expected = played_directly(game, seed, GAMES[game])
    env = make(ENV_ID, {"game": game})
    observation, info = env.reset(options={"task": f"{game}/{seed}"})
    assert observation == (expected[0][0] or info["task"])
    for action, (shown, reward, done) in zip(GAMES[game], expected[1:], strict=False):
        observation, *numbers, info = env.step(action)
        assert (observation, *numbers) == (shown, reward, done, False)
        assert info["won"] == (reward >= 1)
        assert info["score"] == max(0.0, min(1.0, reward))
    assert info["family"] == game
    env.close()


def test_a_game_is_a_pure_function_of_its_id():
    check_games(ENV_ID, "game", GAMES)


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
def test_games_that_swap_reward_and_reason_end_without_reward(game):
    env = make(ENV_ID, {"game": game})
    env.reset(options={"task": f"{game}/1"})
    env.step("what?")
    observation, reward, terminated, _, info = env.step("what?")
    assert (reward, terminated, info["invalid_action"], info["score"]) == (0.0, True, True, 0.0)
    assert "format" in observation or "Bad action" in observation


@pytest.mark.parametrize(
    ("settings", "error", "cause"),
    [
        ({"game": "TicTacToe-v0"}, GeneratorSettingError, "several players"),
        ({"game": "SpiteAndMalice-v0"}, GeneratorSettingError, "several players"),
        ({"game": "Guess-v0"}, GeneratorSettingError, "no game 'Guess-v0'"),
        ({"game_args": {"highest": 3}}, GeneratorSettingError, "highest"),
        ({"game": "Hangman-v0"}, MissingDataError, "nltk.downloader"),
    ],
)
def test_what_cannot_be_played_is_refused(settings, error, cause):
    with pytest.raises(error, match=cause):
        make(ENV_ID, settings).reset(seed=0)
