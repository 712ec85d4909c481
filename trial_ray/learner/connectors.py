"""The user's learner connectors: pieces of RLlib's pipeline that may change the groups of an update."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.errors import CallbackError, ConfigError, UnsupportedError
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

_EPISODES = (
    "learner connectors receive a list of TrajectoryGroup as episodes, and change them in place; RLlib's own connectors and "
    "single_agent_episode_iterator() work with RLlib's episodes"
)
_BATCH = (
    "the learner makes token batches of the groups itself, so nothing reads the batch; change the groups in episodes"
)


def call_connectors(
    pipeline: ConnectorV2, groups: list[TrajectoryGroup], rl_module: Any, metrics: MetricsLogger
) -> None:
    """Call the learner connectors, which may change the groups in place.

    Raises:
        UnsupportedError: ``groups`` contains objects that are not a ``TrajectoryGroup``, such as RLlib's episodes.
        CallbackError: a connector raised an error, or returned a batch.
    """
    if other := [type(group).__name__ for group in groups if not isinstance(group, TrajectoryGroup)]:
        raise UnsupportedError(f"An update trains on objects of type TrajectoryGroup, but got a {other[0]}.")
    try:
        batch = pipeline(rl_module=rl_module, batch={}, episodes=groups, metrics=metrics)
    except Exception as error:
        reason = f" ({_EPISODES})" if _reads_other_episodes(error) else ""
        raise CallbackError(f"A learner connector raised {type(error).__name__}: {error}{reason}.") from error
    if batch:
        raise CallbackError(f"A learner connector returned a batch with the keys {[*batch]}: {_BATCH}.")


def require_connectors(config: AlgorithmConfig) -> None:
    """Reject learner connectors that cannot be built, that read RLlib's episodes, or that return a batch.

    The connectors are called with a synthetic group of one empty turn, and without a module, so their other errors are ignored.

    Raises:
        ConfigError: there is such a connector.
    """
    if config._learner_connector is None:
        return
    try:
        pipeline = config.build_learner_connector(None, None)
    except Exception as error:
        raise ConfigError(
            f"learner_connector is {config._learner_connector!r:.200}, expected a function of the spaces of observations and "
            f"actions that returns a ConnectorV2 or a list of them, but it raised {type(error).__name__}: {error}."
        ) from error
    groups = [TrajectoryGroup("", [Trajectory("", "", 0, [Turn()])])]
    try:
        batch = pipeline(rl_module=None, batch={}, episodes=groups, metrics=MetricsLogger(root=False))
    except Exception as error:
        if not _reads_other_episodes(error):
            return
        raise ConfigError(f"The learner connector cannot be used ({error}): {_EPISODES}.") from error
    if batch:
        raise ConfigError(f"The learner connector returns a batch with the keys {[*batch]}: {_BATCH}.")


def _reads_other_episodes(error: BaseException) -> bool:
    """Return True if the error is from reading an attribute that a group, trajectory or turn does not have."""
    return isinstance(error, AttributeError) and isinstance(error.obj, TrajectoryGroup | Trajectory | Turn)
