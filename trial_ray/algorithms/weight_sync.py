"""Synchronises the engines' weights with the learners'."""

from __future__ import annotations

from trial_ray.algorithms.learner_group import PolicyLearnerGroup
from trial_ray.config.run import RunSettings
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.transfer import merge_offers
from trial_ray.engines.weights import Weights


class WeightSync:
    """Transfers each version of the weights from the learners to the engines.

    With ``colocate``, engines and learners take turns on the devices: :meth:`make_room` before an update, :meth:`send` after it.

    Args:
        config: config of the run.
        learners: learners of the run.
        engines: engines of the run.
    """

    def __init__(self, config: RunSettings, learners: PolicyLearnerGroup, engines: EnginePool) -> None:
        self._config = config
        self._learners = learners
        self._engines = engines

    def make_room(self) -> None:
        """Put the engines to sleep if the learners need their devices."""
        if self._config.colocate:
            self._engines.sleep(self._config.sleep_level)

    def send(self, version: int) -> str:
        """Load the weights into every engine, which is awake afterwards; returns their checksum (``weights_checksum``).

        Raises:
            WeightSyncError: an engine has other weights than were sent, or a learner did not send them in time.
            EngineError: an engine failed.
        """
        if self._config.colocate:
            self._learners.ask(lambda learner: learner.free_memory())
            self._engines.wake("weights")
        lasting = self._config.transfer_backend() == "object_store"
        weights = self._offer(version)
        self._engines.sync(
            weights,
            transmit=lambda: self._learners.ask(lambda learner: learner.sender.transmit()),
            send_again=None if lasting else lambda: self._offer(version, lasting=True),
        )
        self._learners.ask(lambda learner: learner.sender.withdraw())
        if self._config.colocate:
            self._learners.ask(lambda learner: learner.free_memory())
            self._engines.wake("cache")
        return weights.checksum

    def _offer(self, version: int, lasting: bool = False) -> Weights:
        dtype, engines = self._config.engine_dtype(), self._engines.handles
        return merge_offers(
            self._learners.ask(lambda learner: learner.export_weights(version, dtype, engines, lasting))
        )
