"""RLlib's group of learners, changed so that all learners take part in each call, as sharded weights require."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup

from trial_ray.engines.pool import LOAD_TIMEOUT_S, EnginePool
from trial_ray.engines.transfer import merge_weights
from trial_ray.engines.weights import Weights
from trial_ray.errors import CheckpointError, LearnerError, WeightSyncError, refusing
from trial_ray.learner.exchange import TrainingGroups, training_refs
from trial_ray.learner.learner import ONE_MODULE, GRPOLearner
from trial_ray.learner.state import reading_checkpoint
from trial_ray.rllib_internals import learner_actors

Result = TypeVar("Result")
OTHER_RESULTS_S = 5.0
"""Seconds to wait for the results of the other learners after one failed; the death of another learner may be the cause."""
_POLL_S = 60.0


@refusing({"add_module remove_module": ONE_MODULE})
class PolicyLearnerGroup(LearnerGroup):
    """The learners of a run; all of them take part in each call, since sharded weights are gathered by all.

    Attributes:
        weights_set: function that is called after the learners' weights were set, to send them to the engines, or ``None``.
    """

    weights_set: Callable[[], None] | None = None

    def ask(self, call: Callable[[GRPOLearner], Result]) -> list[Result]:
        """Return the result of ``call`` on every learner; sharded learners run it together.

        RLlib returns an error as a result, and omits learners that do not answer; this method raises an error in both cases.

        Raises:
            WeightSyncError: not all learners answered within :data:`LOAD_TIMEOUT_S` seconds.
        """
        expected = max(1, len(self))  # len() counts actors only, not the learner inside this process.
        values: list[Any] = []
        for result in self.foreach_learner(call, timeout_seconds=LOAD_TIMEOUT_S):
            if not result.ok:
                raise result.get()
            values.append(result.get())
        if len(values) < expected:
            raise WeightSyncError(
                f"{len(values)} of {expected} learners answered within {LOAD_TIMEOUT_S:.0f} s. Resume from the last checkpoint; "
                "weight_transfer='object_store' outlives the death of an engine."
            )
        return values

    def update(
        self, *, training_data: TrainingGroups | None = None, timesteps: dict[str, Any] | None = None, **others: Any
    ) -> list[dict[str, Any]]:
        """Train every learner on the groups, and return the metrics of each.

        There is no time limit; the watchdog of the run kills learners that hang.

        Args:
            training_data: references to the groups.
            timesteps: see ``GRPOLearner.update``.
            others: other arguments of RLlib, which are rejected.

        Raises:
            UnsupportedError: no ``training_data``, or another argument was given.
            LearnerError: a learner died.
            RayTaskError: a learner raised an error; Ray's error is also an instance of that error's class.
        """
        training_refs(training_data, None, others)
        timesteps = timesteps or {}
        if self.is_local:
            return list(super().update(training_data=training_data, timesteps=timesteps))
        # RLlib's update() would wait for all learners even if one has failed.
        learners = learner_actors(self)
        calls = [worker.update.remote(training_data=training_data, timesteps=timesteps) for worker in learners]
        pending, results = list(calls), {}
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
            for call in ready:
                try:
                    results[call] = ray.get(call)
                except RayError as error:
                    raise _cause(calls, error, timesteps) from error
        return [results[call] for call in calls]

    def make_room(self, engines: EnginePool) -> None:
        """Put the engines to sleep if they share devices with the learners (``colocate``)."""
        if self.config.colocate:
            engines.sleep(self.config.sleep_level)

    def send_weights(self, engines: EnginePool, version: int) -> str:
        """Load the learners' weights into every engine, and return their checksum; all engines are awake afterwards.

        Raises:
            WeightSyncError: an engine has other weights than were sent, or a learner did not send them in time.
            EngineError: an engine failed.
        """
        config = self.config

        def prepare(for_later_engines: bool = False) -> Weights:
            dtype, handles = config.engine_dtype(), engines.handles
            return merge_weights(
                self.ask(lambda learner: learner.export_weights(version, dtype, handles, for_later_engines))
            )

        for_later_engines = config.transfer_backend() == "object_store"
        if config.colocate:
            self.ask(lambda learner: learner.free_memory())
            # wake() returns whether an engine died. The learner on that engine's GPU must not export tensors by CUDA IPC, since
            # CUDA would free them only after another process has opened them.
            for_later_engines |= engines.wake("weights")
        weights = prepare(for_later_engines)
        engines.sync(
            weights,
            send=lambda: self.ask(lambda learner: learner.sender.send()),
            resend=None if for_later_engines else lambda: prepare(for_later_engines=True),
        )
        self.ask(lambda learner: learner.sender.release())
        if config.colocate:
            self.ask(lambda learner: learner.free_memory())
            engines.wake("cache")
        return weights.checksum

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the first learner's state; see ``GRPOLearner.get_state`` for the arguments and the content."""
        if not self._check_component(COMPONENT_LEARNER, components, not_components):
            return {}
        inside = self._get_subcomponents(COMPONENT_LEARNER, components)
        outside = self._get_subcomponents(COMPONENT_LEARNER, not_components)

        def state_of(learner: GRPOLearner) -> dict[str, Any] | None:
            if learner.exchange.rank and learner.policy_module.sharded is None:
                return None
            state = learner.get_state(inside, not_components=outside, **kwargs)
            return None if learner.exchange.rank else state

        return {COMPONENT_LEARNER: next(filter(None, self.ask(state_of)))}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`get_state`; weights in the state are sent to the engines.

        Raises:
            CheckpointError: the state is of another model; nothing was changed.
        """
        if COMPONENT_LEARNER not in state:
            return
        learner_state = state[COMPONENT_LEARNER]
        sent = ray.put(learner_state) if self.is_remote else learner_state

        def set_on(learner: GRPOLearner) -> CheckpointError | None:
            try:
                learner.set_state(ray.get(sent, timeout=LOAD_TIMEOUT_S) if isinstance(sent, ObjectRef) else sent)
            except CheckpointError as error:
                return error  # Do not raise the error: RLlib would take the learner out of service.
            return None

        if errors := [error for error in self.ask(set_on) if error is not None]:
            raise errors[0]
        if COMPONENT_RL_MODULE in learner_state and self.weights_set is not None:
            self.weights_set()

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write a checkpoint. As in RLlib, one learner writes it; but all learners together write sharded weights.

        Raises:
            CheckpointError: not every learner can access the folder.
            LearnerError: a learner failed, and the checkpoint is incomplete.
        """
        folder: str = super().save_to_path(path, state=state or self.get_state(inference_only=True), **kwargs)
        if failed := self._num_failed():
            raise LearnerError(
                f"{failed} of {len(self)} learners failed while they saved {folder}; the error is logged above"
            )
        if self.config.sharding != "none":
            inside = Path(folder) / COMPONENT_LEARNER
            self.ask(lambda learner: learner.save_shards(inside))
        return folder

    def restore_from_path(self, path: str | Path, **kwargs: Any) -> None:
        """Continue from a checkpoint; its weights are sent to the engines.

        Raises:
            CheckpointError: a learner could not load the checkpoint, or a file is missing.
        """
        with reading_checkpoint(path):
            super().restore_from_path(path, **kwargs)
        if failed := self._num_failed():
            raise CheckpointError(f"{failed} of {len(self)} learners could not load {path}; the error is logged above.")
        if self.weights_set is not None:
            self.weights_set()

    def _num_failed(self) -> int:
        """Return the number of learners that RLlib took out of service; RLlib does not report them on saving or restoring."""
        return 0 if self._worker_manager is None else len(self) - self._worker_manager.num_healthy_actors()


def _cause(calls: list[Any], error: RayError, timesteps: dict[str, Any]) -> Exception:
    """Return an error for the learners that died, if any, else the first error that was raised."""
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=OTHER_RESULTS_S)
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
    return LearnerError(f"{' and '.join(dead)} died in the update of iteration {timesteps.get('training_iteration')}")
