"""Replay of an update from a run's recordings, without environments and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
import torch
from ray.rllib.core import COMPONENT_LEARNER_GROUP
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.algorithms.learner_group import PolicyLearnerGroup
from trial_ray.algorithms.methods import method_of, with_method
from trial_ray.algorithms.startup import initial_policy, policy_folder
from trial_ray.engines.transfer import merge_weights
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.files import Numbers
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.recording import UpdateRecord
from trial_ray.models.loading import load_tokenizer
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.rollout.recording import partitions, read_groups
from trial_ray.runs.checkpoints import list_checkpoints, require_own, require_whole
from trial_ray.runs.config_record import load_method, load_record
from trial_ray.runs.experiment import apply_overrides
from trial_ray.runs.metrics_file import flatten, recorded_metrics
from trial_ray.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig
    from trial_ray.runs.folder import RunFolder


METRICS = f"{LEARNER_RESULTS}/default_policy/"
"""Prefix of the names of the learners' metrics in a run's metrics."""
RUN_DEPENDENT = ("seconds", "lifetime", "timer", "throughput", "weights_seq_no")
"""Metrics with one of these words in their names depend on the clock or on the whole run, and are not compared."""


@dataclass(frozen=True)
class ReplayedUpdate:
    """Result of a replayed update.

    Attributes:
        record: record of the run's own update.
        weights: checksum of the resulting weights (``trial_ray.engines.weights.weights_checksum``).
        metrics: metrics of the learners in the replayed update, by name.
        recorded_metrics: metrics of the learners that the run logged for its own update, by name.
    """

    record: UpdateRecord
    weights: str
    metrics: Numbers
    recorded_metrics: Numbers

    @property
    def same_weights(self) -> bool:
        """True if the replayed update and the run's own update resulted in the same weights, bit for bit."""
        return self.weights == self.record.weights_after


@dataclass(frozen=True)
class Replay:
    """One update of a run, to be repeated with the run's settings or with other settings.

    Attributes:
        run: run that made the update.
        record: inputs and results of the update.
        groups: rollouts that the update trained on.
        checkpoint: checkpoint from which the update starts; ``None`` if it starts from the initial model.
        recorded: the run's config in the update's iteration.
        config: config of the replay.
        changed: whether the method or a setting differs from the run's.
    """

    run: RunFolder
    record: UpdateRecord
    groups: list[TrajectoryGroup]
    checkpoint: Path | None
    recorded: GRPOConfig
    config: GRPOConfig
    changed: bool

    @classmethod
    def of(
        cls,
        run: RunFolder,
        iteration: int,
        method: str | None = None,
        overrides: Sequence[str] = (),
        adapters: Sequence[EnvironmentAdapter] = (),
        *,
        trust: bool = False,
    ) -> Replay:
        """Read the data for a replay; :meth:`play` computes the update.

        Args:
            run: run that made the update.
            iteration: iteration of the update.
            method: name or Python file of the method to use; ``None`` uses the run's own method. If a file defines the run's
                method, the file must be named here.
            overrides: ``key=value`` strings that replace settings of the run.
            adapters: the user's environment adapters with which the run was trained.
            trust: whether to start also from a checkpoint that this user did not write on this machine.

        Raises:
            CheckpointError: the update was not recorded, the checkpoint before it is missing, damaged or possibly from another
                user, or the run's config cannot be read.
            UserInputError: trajectories are missing.
            ConfigError: the method or a setting is wrong.
        """
        path = run.path / "resolved_config.json"
        if (trained := load_method(path)).endswith(".py") and method is None:
            raise CheckpointError(
                f"{run.path} was trained with a method that has its own file, which is run only if you name it: --method "
                f"{trained}."
            )
        recorded = load_record(path, adapters, method if method and method.endswith(".py") else None, iteration)
        recorded.recording(trajectories_folder=None, training_folder=None)
        config = apply_overrides(with_method(recorded, method or method_of(recorded)), overrides)
        config.validate()
        # A replay has no engines, so reset settings that require them.
        config.engines(colocate=False, weight_transfer="object_store")
        record = UpdateRecord.read(run.training, iteration)
        checkpoint = _checkpoint_before(run, iteration)
        if checkpoint is not None:
            require_whole(checkpoint)
            if not trust:
                require_own(checkpoint)
            _require_same_state(recorded, config, checkpoint)
        groups = read_groups(run.trajectories, record.group_ids, iteration)
        changed = bool(overrides) or type(config) is not type(recorded)
        return cls(run, record, groups, checkpoint, recorded, config, changed)

    def play(self) -> ReplayedUpdate:
        """Repeat the update of the recorded iteration with the saved rollouts and the replay's config; Ray must be running.

        Raises:
            CheckpointError: the update would not start from the weights that sampled the rollouts.
            ConfigError: this machine lacks devices for the learners.
        """
        # Load the tokenizer and the frozen reference model from the initial policy, even if the replay starts from a checkpoint.
        self.config.rl_module(model_path=initial_policy(self.config), warm_start=None)
        if self.config.teacher_model is not None:
            self.config.teacher_model = policy_folder(self.config.teacher_model)
        tokenizer = load_tokenizer(str(self.config.model_path))
        for group in self.groups:
            add_teacher_contexts(group, self.config, tokenizer)
        with self._learners() as learners:
            if self.checkpoint is not None:
                learners.restore_from_path(self.checkpoint.absolute() / COMPONENT_LEARNER_GROUP)
            self._require_same_start(self._checksum(learners))
            if self.changed:
                steps = self._steps_before()
                learners.ask(lambda learner: learner.apply_optimizer_settings(steps))
            results = learners.update(
                training_data=TrainingGroups(episodes_refs=[ray.put(group) for group in self.groups]),
                timesteps=self.record.timesteps,
            )
            weights = self._checksum(learners)
        logged = MetricsLogger(root=True)
        logged.aggregate(results, key=LEARNER_RESULTS)
        recorded = recorded_metrics(self.run.metrics, self.record.iteration)
        return ReplayedUpdate(
            self.record, weights, _update_metrics(flatten(logged.reduce())), _update_metrics(recorded)
        )

    def _steps_before(self) -> int:
        """Return the number of environment steps up to the previous update; a learning-rate schedule depends on this number."""
        earlier = [number for number in partitions(self.run.training) if number < self.record.iteration]
        if not earlier:
            return 0
        return UpdateRecord.read(self.run.training, earlier[-1]).timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME]

    def _require_same_start(self, checksum: str) -> None:
        if checksum == self.record.weights_before:
            return
        where = f"{self.checkpoint}" if self.checkpoint else f"the initial model {self.config.model_path}"
        raise CheckpointError(
            f"The weights in {where} have checksum {checksum}; the weights that sampled iteration {self.record.iteration} had "
            f"{self.record.weights_before}. Restore the files that the run had."
        )

    # -- learners ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _learners(self) -> Iterator[PolicyLearnerGroup]:
        """Start the learners; if the learner runs in this process, it uses as many threads as the run's learner did."""
        self._require_devices()
        threads = torch.get_num_threads()
        if not self.config.num_learners and self.record.num_threads:
            torch.set_num_threads(self.record.num_threads)
        try:
            group = self.config.build_learner_group()
            try:
                yield group
            finally:
                group.shutdown()
        finally:
            torch.set_num_threads(threads)

    def _require_devices(self) -> None:
        """Raise an error if the cluster lacks devices for the learners, because RLlib would wait for them forever."""
        config, available = self.config, ray.cluster_resources()
        # "auto" means one CPU for a learner without a GPU.
        cpus = config.num_cpus_per_learner if config.num_cpus_per_learner != "auto" else not config.num_gpus_per_learner
        wanted = {"GPU": config.num_gpus_per_learner * max(1, config.num_learners), "CPU": cpus * config.num_learners}
        for device, number in wanted.items():
            if number > available.get(device, 0):
                raise ConfigError(
                    f"The update needs {number:g} {device}s for its learners; {available.get(device, 0):g} are here. Replay it "
                    "where it was trained, or with --set num_learners=0 --set num_gpus_per_learner=0 in one process on the CPU, "
                    "where weights may differ in their last bits."
                )

    def _checksum(self, learners: PolicyLearnerGroup) -> str:
        """Return the checksum of the learners' weights in the dtype of the run's engines."""
        dtype = self.recorded.engine_dtype()
        return merge_weights(
            learners.ask(lambda learner: learner.export_weights(0, dtype, for_later_engines=True))
        ).checksum


def _checkpoint_before(run: RunFolder, iteration: int) -> Path | None:
    """Return the checkpoint from which an update started; ``None`` if it started from the initial model."""
    if iteration == 1:
        return None
    path = run.checkpoints / f"{iteration - 1:06d}"
    saved = list_checkpoints(run.checkpoints)
    if path in saved:
        return path
    starts = {1, *(int(checkpoint.name) + 1 for checkpoint in saved)}
    replayable = [str(number) for number in partitions(run.training) if number in starts]
    raise CheckpointError(
        f"{path} does not exist, but iteration {iteration} started from it: it was removed for newer ones, or never written. "
        f"Iterations that can be replayed: {', '.join(replayable) or 'none'}. A run keeps more with `trial-ray train "
        "--checkpoint-every 1 --keep-checkpoints N`."
    )


def _require_same_state(recorded: GRPOConfig, config: GRPOConfig, checkpoint: Path) -> None:
    """Reject a config that needs teacher weights, or LoRA weights of another rank, that the checkpoint does not contain.

    A checkpoint contains teacher weights only if the run set ``teacher_sync_iterations``.
    """
    if config.teacher_sync_iterations is not None and recorded.teacher_sync_iterations is None:
        raise CheckpointError(
            f"{type(config).__name__} has an earlier policy as teacher (teacher_sync_iterations="
            f"{config.teacher_sync_iterations}), which {checkpoint} lacks: the run had none. Set "
            "teacher_sync_iterations=None, so that the policy before the update scores the teacher context, or replay iteration 1."
        )
    if config.lora_rank != recorded.lora_rank:
        raise CheckpointError(
            f"lora_rank is {config.lora_rank}, but {checkpoint} was written with {recorded.lora_rank}. Keep that value, or replay "
            "iteration 1."
        )


def _update_metrics(metrics: Numbers) -> Numbers:
    return {
        name.removeprefix(METRICS): value
        for name, value in metrics.items()
        if name.startswith(METRICS) and not any(part in name for part in RUN_DEPENDENT)
    }
