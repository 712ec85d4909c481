"""Untrained policies, and an empty cache."""

from dataclasses import replace

import pytest
from warm_starts import HOME, SETTINGS

from trial_ray.files import CACHE_VARIABLE
from trial_ray.warmstart.policy import load_policy, set_threads


@pytest.fixture(scope="module")
def policy():
    """Function that makes an untrained policy with settings that differ from ``SETTINGS``; one thread computes."""
    with set_threads(SETTINGS):
        yield lambda **changes: load_policy(replace(SETTINGS, **changes), HOME)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Folder of an empty cache, for models whose checks are played although they know nothing yet."""
    monkeypatch.setenv(CACHE_VARIABLE, f"{tmp_path}/cache")
    monkeypatch.setattr("trial_ray.warmstart.warmstart.MIN_RESPONSE_ACCURACY", 0.0)
    return tmp_path / "cache"
