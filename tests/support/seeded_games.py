"""Environments of other libraries that are made from seeds, for ``tests/peers``."""

import gymnasium

import trial_envs  # noqa: F401  registers the ids


def make(env_id, settings):
    """Return an instance without Gymnasium's own checks."""
    return gymnasium.make(env_id, disable_env_checker=True, **settings)
