"""Environments of other libraries that are made from seeds, for ``tests/peers``."""

from __future__ import annotations

from typing import Any

import gymnasium

import trial_envs  # noqa: F401  registers the ids


def make(env_id: str, settings: dict[str, Any]) -> gymnasium.Env[str, str]:
    """Return an instance without Gymnasium's own checks."""
    return gymnasium.make(env_id, disable_env_checker=True, **settings)
