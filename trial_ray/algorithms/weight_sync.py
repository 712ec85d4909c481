"""Updates on all learners, and their weights sent to all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.rllib.core.learner.learner_group import LearnerGroup

from trial_ray.config.run import RunSettings
from trial_ray.engines.pool import LOAD_TIMEOUT_S, EnginePool
from trial_ray.engines.transfer import merge_offers
from trial_ray.engines.weights import Weights
from trial_ray.errors import LearnerError, WeightSyncError
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.learner import GRPOLearner
from trial_ray.ray_internals import learner_actors

Result = TypeVar("Result")


class WeightSync:
    """Brings each version of the weights from the learners into the engines.

    With ``colocate``, engines and learners take turns on the devices: :meth:`make_room` before an update, :meth:`send` after it.

    Args:
        config: of the run.
        learners: of the run.
        engines: of the run.
    """

    def __init__(self, config: RunSettings, learners: LearnerGroup, engines: EnginePool) -> None:
        self._config = config
        self._learners = learners
        self._engines = engines

    def make_room(self) -> None:
        """Let the engines sleep where the learners need their devices."""
        if self._config.colocate:
            self._engines.sleep(self._config.sleep_level)

    def send(self, version: int) -> str:
        """Load the weights into every engine, which is awake then; returns their checksum (``weights_checksum``).

        Raises:
            WeightSyncError: an engine holds other weights than were sent, or a learner did not send them in time.
            EngineError: an engine failed.
        """
        if self._config.colocate:
            self._all(lambda learner: learner.free_memory())
            self._engines.wake("weights")
        lasting = self._config.transfer_backend() == "object_store"
        weights = self._offer(version)
        self._engines.sync(
            weights,
            transmit=lambda: self._all(lambda learner: learner.sender.transmit()),
            send_again=None if lasting else lambda: self._offer(version, lasting=True),
        )
        self._all(lambda learner: learner.sender.withdraw())
        if self._config.colocate:
            self._all(lambda learner: learner.free_memory())
            self._engines.wake("cache")
        return weights.checksum

    def _offer(self, version: int, lasting: bool = False) -> Weights:
        dtype, engines = self._config.engine_dtype(), self._engines.handles
        return merge_offers(self._all(lambda learner: learner.export_weights(version, dtype, engines, lasting)))

    def _all(self, call: Callable[[GRPOLearner], Result]) -> list[Result]:
        return ask_learners(self._learners, call)


def ask_learners(learners: LearnerGroup, call: Callable[[GRPOLearner], Result]) -> list[Result]:
    """The call's result on every learner; sharded learners run it together.

    RLlib hands over an error as an answer, and leaves out who does not answer; both are raised here.

    Raises:
        WeightSyncError: not all of them answered within :data:`LOAD_TIMEOUT_S` seconds.
    """
    expected = max(1, len(learners))  # RLlib counts actors, and none inside this process
    values: list[Any] = []
    for result in learners.foreach_learner(call, timeout_seconds=LOAD_TIMEOUT_S):
        if not result.ok:
            raise result.get()
        values.append(result.get())
    if len(values) < expected:
        raise WeightSyncError(
            f"{len(values)} of {expected} learners answered within {LOAD_TIMEOUT_S:.0f} s. Resume from the last checkpoint; "
            "weight_transfer='object_store' outlives the death of an engine."
        )
    return values


FAILED_TOGETHER_S = 5.0
"""How long to wait, once a learner failed, for what the others say: the cause may be the death of one of them."""
_LOOK_S = 60.0


def update_learners(learners: LearnerGroup, data: TrainingGroups, timesteps: dict[str, Any]) -> list[dict[str, Any]]:
    """Train every learner on the groups; returns the metrics of each.

    It ends with the learners, however long they compute; the watch over the run's progress kills those that hang.

    Raises:
        LearnerError: a learner died.
        RayTaskError: a learner raised; it is of the class of what was raised, too.
    """
    if learners.is_local:
        return list(learners.update(training_data=data, timesteps=timesteps))
    # Not through RLlib's update, which waits for all learners when one has failed. References are packed once for all learners.
    packed = ray.put(data)
    calls = [worker.update.remote(training_data=packed, timesteps=timesteps) for worker in learner_actors(learners)]
    pending, results = list(calls), {}
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_S)
        for call in ready:
            try:
                results[call] = ray.get(call)
            except RayError as error:
                raise _cause(calls, error, timesteps) from error
    return [results[call] for call in calls]


def _cause(calls: list[Any], error: RayError, timesteps: dict[str, Any]) -> Exception:
    """The death of a learner, where there was one, else what was raised first."""
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=FAILED_TOGETHER_S)
    dead = []
    for call in ready:
        try:
            ray.get(call)
        except RayActorError:
            dead.append(f"learner {calls.index(call)}")
        except RayError:
            continue
    if not dead:
        return error
    return LearnerError(f"{' and '.join(dead)} died in the update of iteration {timesteps['training_iteration']}")
