"""A user's environments under their ids, known to Gymnasium in the driver alone."""

import sys
from contextlib import contextmanager
from pathlib import Path

import gymnasium
from gymnasium.envs.registration import EnvSpec
from ray import cloudpickle

from trial_ray.adapters import EnvironmentAdapter, EnvironmentEntry

TESTS = Path(__file__).parents[1]


@contextmanager
def registered(*classes):
    """Register each class under its ``ENV_ID``; actors, which cannot import modules of the tests, get it by value."""
    defined = {sys.modules[base.__module__] for each in classes for base in each.__mro__}
    modules = {each for each in defined if Path(getattr(each, "__file__", None) or "/").is_relative_to(TESTS)}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    for each in classes:
        gymnasium.register(each.ENV_ID, entry_point=each)
    try:
        yield
    finally:
        for each in classes:
            del gymnasium.registry[each.ENV_ID]
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def entry_of(env_class, config=None, **adapter):
    """The entry of a class that need not be registered; ``adapter`` are fields of its adapter."""
    env_id = env_class.ENV_ID
    spec = EnvSpec(env_id, entry_point=env_class)
    return EnvironmentEntry(spec, EnvironmentAdapter(env_id, **adapter), config or {}, name=env_id.rpartition("/")[2])
