"""``trial/TextArena-v0``: games, answers and rewards are those of TextArena itself."""

from __future__ import annotations

import pytest
from seeded_games import make

from trial_envs.errors import GeneratorSettingError, MissingDataError

pytestmark = pytest.mark.peers

ENV_ID = "trial/TextArena-v0"
GAMES = {
    "GuessTheNumber-v0": ["[10]", "[10]", "what?", "4", "[15]", "[3]", "[17]", "[12]", "[6]", "[1]", "[20]", "[9]"],
    "2048-v0-ultra-easy": ["[up]", "[left]", "[down]", "[right]"] * 6,
    "Bandit-v0": ["[red]", "[blue]", "[pink]", "[red]", "[green]"] * 3,
    "Blackjack-v0": ["[hit]", "[stand]", "[hit]", "[hit]"] * 3,
    "ThreeCardMonte-v0": ["[0]"],
}


def played_directly(game: str, seed: int, actions: list[str]) -> list[tuple[str, float, bool]]:
    """Return texts, rewards and ends of TextArena's own loop, without the wrappers that repeat earlier messages."""
    ta = pytest.importorskip("textarena")
    env = ta.wrappers.ActionFormattingWrapper(ta.make(f"{game}-raw"))
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
def test_a_game_is_textarenas_own(game):
    seed = 2_000_017
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


def test_games_that_swap_reward_and_reason_end_without_reward():
    env = make(ENV_ID, {"game": "ThreeCardMonte-v0"})
    env.reset(seed=1)
    env.step("what?")
    observation, reward, terminated, _, info = env.step("what?")
    assert (reward, terminated, info["invalid_action"], info["score"]) == (0.0, True, True, 0.0)
    assert "format" in observation or "Bad action" in observation


@pytest.mark.parametrize(
    ("settings", "error", "cause"),
    [
        ({"game": "TicTacToe-v0"}, GeneratorSettingError, "several players"),
        ({"game": "Guess-v0"}, GeneratorSettingError, "no game 'Guess-v0'"),
        ({"game": "Hangman-v0"}, MissingDataError, "nltk.downloader"),
    ],
)
def test_what_cannot_be_played_is_refused(settings, error, cause):
    with pytest.raises(error, match=cause):
        make(ENV_ID, settings).reset(seed=0)
