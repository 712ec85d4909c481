"""Named protocols set the limits of published evaluations."""

import pytest

from trial_ray.cli.evaluate import checkpoint_config
from trial_ray.evaluation.evaluation_sets import NAMED_PROTOCOLS

LIMITS = {"trial/ALFWorld-v0": (50, 2048, 512, 2, 0.4), "trial/WebShop-v0": (15, 4096, 512, 2, 0.4)}


@pytest.mark.parametrize("name", NAMED_PROTOCOLS)
def test_named_protocol_sets_limits(name):
    for env, protocol in NAMED_PROTOCOLS[name].items():
        config, _ = checkpoint_config("oracle", env, protocol.split, list(protocol.overrides))
        assert (
            config.env_config["max_turns"],
            config.max_prompt_tokens,
            config.max_response_tokens,
            config.history_window,
            config.evaluation_temperature,
        ) == LIMITS[env]
        assert config.env_config["split"] == protocol.split
