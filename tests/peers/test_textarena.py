"""``trial/TextArena-v0``: games, answers and rewards are those of TextArena itself."""

import pytest
from seeded_games import make

from trial_envs.errors import GeneratorSettingError, MissingDataError

ENV_ID = "trial/TextArena-v0"
GAMES = {
    "GuessTheNumber-v0": ["[10]", "[10]", "what?", "4", "[15]", "[3]", "[17]", "[12]", "[6]", "[1]", "[20]", "[9]"],
    "2048-v0-ultra-easy": ["[up]", "[left]", "[down]", "[right]"] * 6,
    "Bandit-v0": ["[red]", "[blue]", "[pink]", "[red]", "[green]"] * 3,
    "Blackjack-v0": ["[hit]", "[stand]", "[hit]", "[hit]"] * 3,
    "ThreeCardMonte-v0": ["[0]"],
}
SEED = 2_000_017


def played_directly(game):
    """Return texts, rewards and ends of TextArena's own loop, without the wrappers that repeat earlier messages."""
    ta = pytest.importorskip("textarena")
    env = ta.wrappers.ActionFormattingWrapper(ta.make(f"{game}-raw"))
    env.reset(num_players=1, seed=SEED)
    kinds = (ta.ObservationType.PROMPT, ta.ObservationType.PLAYER_ACTION)
    answers = []
    for action in [None, *GAMES[game]]:
        done = action is not None and env.step(action=action)[0]
        _, messages = env.get_observation()
        shown = "\n".join(text.strip() for _, text, kind in messages if kind not in kinds).strip()
        if done:
            rewards, info = env.close()
            return [*answers, (f"{shown}\n{info[0]['reason']}".strip(), float(rewards[0]), True)]
        answers.append((shown, 0.0, False))
    return answers


@pytest.mark.parametrize("game", GAMES)
def test_a_game_is_textarenas_own(game):
    expected = played_directly(game)
    env = make(ENV_ID, {"game": game})
    observation, info = env.reset(options={"task": f"{game}/{SEED}"})
    assert observation == (expected[0][0] or info["task"])
    for action, (shown, reward, done) in zip(GAMES[game], expected[1:], strict=False):
        observation, *numbers, info = env.step(action)
        assert observation == shown
        assert numbers == [reward, done, False]
        assert info["won"] == (reward >= 1)
        assert info["score"] == max(0.0, min(1.0, reward))
    assert info["family"] == game
    env.close()


def test_games_that_swap_reward_and_reason_end_without_reward():
    env = make(ENV_ID, {"game": "ThreeCardMonte-v0"})
    env.reset(seed=1)
    env.step("what?")
    observation, reward, terminated, _, info = env.step("what?")
    assert reward == info["score"] == 0.0
    assert terminated is True
    assert info["invalid_action"] is True
    assert "format" in observation or "Bad action" in observation


@pytest.mark.parametrize(
    ("game", "error", "cause"),
    [
        ("TicTacToe-v0", GeneratorSettingError, "several players"),
        ("Guess-v0", GeneratorSettingError, "no game 'Guess-v0'"),
        ("Hangman-v0", MissingDataError, "nltk.downloader"),
    ],
)
def test_what_cannot_be_played_is_refused(game, error, cause):
    with pytest.raises(error, match=cause):
        make(ENV_ID, {"game": game}).reset(seed=0)
