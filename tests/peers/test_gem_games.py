"""``trial/GEM-v0``: the answers and rewards are those of GEM's own environments."""

import pytest
from seeded_games import make

GAMES = {
    "game:GuessTheNumber-v0-easy": ["\\boxed{5}", "\\boxed{5}", "\\boxed{99}", "\\boxed{7}"],
    "game:Minesweeper-v0-easy": ["\\boxed{reveal 1 1}", "\\boxed{flag 0 0}", "\\boxed{reveal 4 4}"],
    "game:TowerofHanoi-v0-easy": ["\\boxed{A C}", "\\boxed{A B}", "\\boxed{C B}", "\\boxed{B B}"],
    "rg:chain_sum": ["\\boxed{5}"],
}


@pytest.mark.parametrize("game", GAMES)
def test_an_environment_is_gems_own(game):
    gem = pytest.importorskip("gem")
    own, env = gem.make(game), make("trial/GEM-v0", {"game": game})
    task, details = own.reset(seed=2_000_017)  # from here on, GEM draws from the global generators
    observation, info = env.reset(options={"task": f"{game}/2000017"})
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
