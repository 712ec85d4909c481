"""Settings of a warm start of seconds in generated household games."""

from trial_ray.adapters.registry import make_entries
from trial_ray.warmstart import WarmStartSettings

SETTINGS = WarmStartSettings(
    env_config={"difficulty": "tiny", "max_turns": 8},
    size="nano",
    games=6,
    max_steps=4,
    check_every=2,
    check_games=3,
    evaluation_games=5,
    threads=1,
)
(HOME,) = make_entries([(SETTINGS.env, SETTINGS.env_config, 1.0)])
