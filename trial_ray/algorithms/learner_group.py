"""RLlib's group of learners, whose states hold the weights also where each learner has a part of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_RL_MODULE
from ray.rllib.core.learner.learner_group import LearnerGroup

from trial_ray.algorithms.weight_sync import ask_learners
from trial_ray.engines.pool import LOAD_TIMEOUT_S
from trial_ray.errors import CheckpointError, refusing
from trial_ray.learner.learner import ONE_MODULE, GRPOLearner


@refusing({"add_module": ONE_MODULE, "remove_module": ONE_MODULE})
class PolicyLearnerGroup(LearnerGroup):
    """The learners of a run; all of them take part in each call, since sharded weights are gathered by all.

    Attributes:
        weights_set: called when other weights have been set, which the engines do not hold yet.
    """

    weights_set: Callable[[], None] | None = None

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the first learner's state; arguments and content as ``GRPOLearner.get_state``."""
        if not self._check_component(COMPONENT_LEARNER, components, not_components):
            return {}
        inside = self._get_subcomponents(COMPONENT_LEARNER, components)
        outside = self._get_subcomponents(COMPONENT_LEARNER, not_components)

        def state_of(learner: GRPOLearner) -> dict[str, Any] | None:
            state = learner.get_state(inside, not_components=outside, **kwargs)
            return None if learner.exchange.rank else state

        return {COMPONENT_LEARNER: next(filter(None, ask_learners(self, state_of)))}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken, and have weights that it holds sent to the engines.

        Raises:
            CheckpointError: the state is of another model; nothing was changed.
        """
        if COMPONENT_LEARNER not in state:
            return
        given = state[COMPONENT_LEARNER]
        sent = ray.put(given) if self.is_remote else given

        def set_on(learner: GRPOLearner) -> CheckpointError | None:
            try:
                learner.set_state(ray.get(sent, timeout=LOAD_TIMEOUT_S) if isinstance(sent, ObjectRef) else sent)
            except CheckpointError as error:  # raised on an actor, it would make RLlib take the learner out of service
                return error
            return None

        if errors := [error for error in ask_learners(self, set_on) if error is not None]:
            raise errors[0]
        if COMPONENT_RL_MODULE in given and self.weights_set is not None:
            self.weights_set()

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write a checkpoint: RLlib asks one learner to write; sharded weights are written by all of them together.

        Raises:
            CheckpointError: not every learner sees the folder.
        """
        folder: str = super().save_to_path(path, state=state or self.get_state(inference_only=True), **kwargs)
        if self.config.sharding != "none":
            inside = Path(folder) / COMPONENT_LEARNER
            ask_learners(self, lambda learner: learner.save_shards(inside))
        return folder

    def restore_from_path(self, path: str | Path, **kwargs: Any) -> None:
        """Continue from a checkpoint, and have its weights sent to the engines."""
        super().restore_from_path(path, **kwargs)
        if self.weights_set is not None:
            self.weights_set()
