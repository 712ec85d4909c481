"""GRPO as an RLlib algorithm: an iteration samples groups, updates the policy, syncs weights and evaluates."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup, remove_placement_group

from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER, RunActor, answering, end_processes
from trial_ray.algorithms.config import TextAlgorithmConfig
from trial_ray.algorithms.health_checks import HealthChecks
from trial_ray.algorithms.placement import create_engines, learners_in, require_resources, reserve_pairs, with_engines
from trial_ray.algorithms.rllib_calls import RLlibCalls
from trial_ray.algorithms.sampled_batch import SampledBatch
from trial_ray.algorithms.sampling import GroupSampler
from trial_ray.algorithms.startup import (
    compare_initial_weights,
    list_tasks,
    require_memory,
    require_tokens,
    resolved,
    teacher_digest,
)
from trial_ray.algorithms.timeline import Timeline, collect_timeline
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import FAULTS, answers
from trial_ray.engines.requirements import require_engine
from trial_ray.errors import CheckpointError, ConfigError, InfrastructureError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.player import play_evaluation_set, policy_protocol
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.recording import UpdateRecord
from trial_ray.metrics import EFFECTIVE_SAMPLE_SIZE, ENV_RUNNERS, log, log_time, peek
from trial_ray.process import ITERATION, event, peak_memory
from trial_ray.rllib_internals import env_runner_actors, env_runners_of, learner_actors, trial_folder
from trial_ray.rollout.env_runner_pool import EnvRunnerPool
from trial_ray.rollout.groups import GroupSample, RolloutCounts
from trial_ray.rollout.runner_group import TextEnvRunnerGroup

logger = logging.getLogger(__name__)
REPORT_TIMEOUT_S = 10.0
"""Seconds to wait for the actors' reports and events."""


class GRPOConfig(TextAlgorithmConfig):
    """Configuration of group-relative policy optimisation of a language-model agent in a text environment.

    .. code-block:: python

        config = (
            GRPOConfig()
            .environment("trial/ALFWorld-v0", env_config={"split": "train"})
            .rl_module(model_path="Qwen/Qwen3-1.7B")
            .training(lr=1e-6, group_size=8, tasks_per_iteration=16)
            .engines(engine="vllm", num_engines=1)
        )
        algo = config.build_algo()

    Other methods derive from this class (``trial_ray/algorithms/methods``): they set ``method_class`` and declare their own
    settings, which ``training()`` accepts like the shared settings.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)


class GRPO(RLlibCalls):
    """Group-relative policy optimisation of a language-model agent.

    Env runners play episodes, engines sample responses, and learners update the policy. All of them are actors, but by default
    the only learner is inside the algorithm's process. With learner actors, that process has only metrics and references to data.
    """

    config: GRPOConfig
    pairs: PlacementGroup | None = None
    _weights_sent = True
    """False between an update and the weight sync after it."""
    _made_for: tuple[Any, ...] | None = None
    """Arguments with which the engines and env runners were created."""

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        """Return the default configuration."""
        return GRPOConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """Return the bundles that a Tune trial reserves; a range of numbers of engines or env runners counts as its minimum."""
        full: GRPOConfig = cls.get_default_config().update_from_dict(config) if isinstance(config, dict) else config
        fixed = full.copy(copy_frozen=False)
        fixed.num_env_runners, _ = actor_range(full.num_env_runners)
        base = super().default_resource_request(fixed)
        return PlacementGroupFactory(with_engines(base.bundles, full), strategy=full.placement_strategy)

    # -- life cycle ------------------------------------------------------------------------------------------------

    def setup(self, config: Any) -> None:
        """Check the configuration, then start engines, env runners and learners."""
        config = self.config
        require_engine(config.engine, config.num_gpus_per_engine)
        self.tasks, first_turns = list_tasks(config)
        self.evaluation_sets = {
            entry.name: (EvaluationSet.from_entry(entry, config.evaluation_num_tasks, config.evaluation_seed), entry)
            for entry in config.evaluation_entries()
        }
        self.config = config = resolved(config, trial_folder(self))
        self.chat_template = require_tokens(config, first_turns)
        require_memory(config)
        self.health_checks = HealthChecks(config)
        self.weight_version = 0
        self.phase = ""
        request = self.default_resource_request(config)
        kept = self._keep_actors(request)
        self.is_stopped = False  # cleanup() of an earlier trial may have set is_stopped.
        in_trial = get_current_placement_group() is not None  # In a trial, Tune has reserved the resources.
        if not kept and not in_trial:
            # The first bundle is for this process, which is not an actor.
            require_resources(request.bundles[1:], config.resource_timeout_s)
            self.pairs = reserve_pairs(request.bundles, config)
        try:
            if not kept:
                # Create the engines before RLlib's actors, or a learner without a fixed bundle could take an engine's bundle.
                self.engine_pool = create_engines(config, self.pairs, request.bundles if in_trial else None)
            if config.colocate:
                # Start the engines before the learners, so that each bundle has room for only one learner, beside its engine.
                self.engine_pool.start(config.engine_start_timeout_s)
                self.engine_pool.sleep(config.sleep_level)
            runners, _ = actor_range(config.num_env_runners)
            before = self.env_runner_group if kept else None
            with learners_in(self.pairs), env_runners_of(before, runners, TextEnvRunnerGroup):
                super().setup(config)
            self._set_up_callbacks()
            self.engine_pool.start(config.engine_start_timeout_s)
            self.workers = EnvRunnerPool(config, self.env_runner_group, self.engine_pool, kept, self._call_recreated)
            self.sampler = GroupSampler(config, self.tasks, self.workers, version=lambda: self.weight_version)
            self._sync_weights()
            self.initial_weights = {"checksum": self.weights_checksum, "dtype": config.engine_dtype()}
            self.teacher_weights = teacher_digest(config)
            self.learner_group.weights_set = self._send_set_weights
            if not in_trial:  # A Tune trial cannot start actors outside its placement group.
                self.workers.grow()
            self._call_back("on_algorithm_init", metrics_logger=self.metrics)  # RLlib would do this before setup ends.
        except BaseException:
            self.cleanup()
            raise

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start another trial of a sweep and return True; engines and env runners are kept if the trial needs equal ones.

        Raises:
            ConfigError: a setting of the trial is invalid. :meth:`setup` may raise other errors.
        """
        config = self.get_default_config().update_from_dict(new_config)
        config.validate()
        config.freeze()
        try:
            learners = self.__dict__.pop("learner_group", None)
            if learners is not None:  # The previous trial has no learners if its setup failed.
                self.sampler.cancel()
                learners.shutdown()
            self.config = config
            self._env_id, self.env_creator = self._get_env_id_and_creator(config.env, config)
            self.metrics = MetricsLogger(root=True, stats_cls_lookup=config.stats_cls_lookup)
            self.setup(config)
        except BaseException:
            self._end_actors()
            raise
        return True

    def _end_actors(self) -> None:
        self.cleanup()
        for name in ("learner_group", "env_runner_group", "engine_pool", "_made_for"):
            self.__dict__.pop(name, None)

    def _keep_actors(self, request: PlacementGroupFactory) -> bool:
        """Keep an earlier trial's engines and env runners and return True if they match this trial; otherwise stop them."""
        arguments = (self.config.engine_pool_arguments(), self.config.num_env_runners, request)
        if self._made_for == arguments:
            self.engine_pool.renew()
            return True
        if self._made_for is not None:
            self._end_actors()
        self.pairs, self._made_for = None, arguments
        return False

    def actors(self) -> list[RunActor]:
        """Return all actors of the run that exist now."""
        engines = self.engine_pool.handles if hasattr(self, "engine_pool") else ()
        handles: dict[str, Iterable[tuple[int, Any]]] = {
            ENV_RUNNER: env_runner_actors(getattr(self, "env_runner_group", None)).items(),
            ENGINE: enumerate(engines),
            LEARNER: enumerate(learner_actors(getattr(self, "learner_group", None))),
        }
        return [RunActor(kind, index, handle) for kind, indexed in handles.items() for index, handle in indexed]

    def cleanup(self) -> None:
        """Stop all actors. Actors that do not answer in time, or all actors after ``KeyboardInterrupt``, are killed at once."""
        self.is_stopped = True
        if "sampler" in vars(self):
            self.sampler.cancel()
        if "workers" in vars(self):  # hasattr() would find RLlib's Algorithm.workers.
            self.workers.withdraw()
        actors = self.actors()
        answered = [] if isinstance(sys.exception(), KeyboardInterrupt) else answering(actors)
        # Kill actors that do not answer: RLlib would wait for them without a deadline.
        end_processes([actor for actor in actors if actor not in answered])
        if hasattr(self, "engine_pool"):
            self.engine_pool.stop()
        super().cleanup()
        end_processes(answered)
        if self.pairs is not None:
            remove_placement_group(self.pairs)

    def step(self) -> dict[str, Any]:
        """Run RLlib's iteration; if actors were lost or replaced, the result describes this under the key :data:`FAULTS`."""
        self._require_running("train")
        with event(ITERATION, number=self.iteration + 1):
            result: dict[str, Any] = super().step()
        return {**result, FAULTS: faults} if (faults := self.take_faults()) else result

    def take_faults(self) -> str:
        """Return a line about the actors that were lost or replaced since the last call; empty if there were none."""
        return self.engine_pool.faults.pop_line()

    # -- one iteration ---------------------------------------------------------------------------------------------

    def training_step(self) -> None:
        """Sample groups of rollouts, update on them, send the new weights to the engines, and run the health checks.

        Raises:
            TrainingDivergedError: the policy diverged in the previous iterations.
        """
        self.health_checks.require_healthy()
        if not self._weights_sent:
            self._sync_weights()
        log(self.metrics, "actors/num_engines", len(self.engine_pool.handles))
        log(self.metrics, "actors/num_env_runners", len(self.env_runner_group.healthy_env_runner_ids()))
        with self._phase("sampling"):
            batch = self.sampler.sample(self.iteration + 1)
        self._log_batch(batch)
        if batch.kept:
            sampled_by = self.weights_checksum
            with self._phase("update"):
                timesteps = self._update(batch.kept)
            with self._phase("sync"):
                self.workers.adapt(self.sampler.runners_with_groups())
                self._sync_weights()
            self._record_update(timesteps, sampled_by)
        else:
            logger.warning("iteration %d trained nothing: %s", self.iteration + 1, batch.reason)
        self.health_checks.check_iteration(self.iteration + 1, self.metrics, trained=bool(batch.kept))

    def _log_batch(self, batch: SampledBatch) -> None:
        """Log the metrics of groups, turn rows and rollouts, and the metrics that callbacks logged."""
        names = [entry.name for entry in self.config.environment_entries()]
        rollouts = {f"{ENV_RUNNERS}{key}": value for key, value in batch.rollout_metrics(names).items()}
        for key, value in {**batch.metrics(), **rollouts}.items():
            log(self.metrics, key, value)
        self._log_callbacks(self.workers.pop_logged(in_evaluation=False))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Set the current phase and log its duration in seconds."""
        self.phase = name
        with log_time(self.metrics, f"seconds/{name}"), event(name):
            yield
        self.phase = ""

    def _update(self, samples: list[GroupSample]) -> dict[str, int]:
        """Train on the groups, and return the values on which the learners' schedules depend, such as the number of env steps."""
        self._weights_sent = False
        self.learner_group.make_room(self.engine_pool)
        num_steps = peek(self.metrics, f"{ENV_RUNNERS}{NUM_ENV_STEPS_SAMPLED_LIFETIME}")
        timesteps = {
            NUM_ENV_STEPS_SAMPLED_LIFETIME: int(num_steps or 0),
            "training_iteration": self.iteration + 1,
            "weight_version": self.weight_version,
        }
        data = TrainingGroups(episodes_refs=[sample.group for sample in samples])
        results = self.learner_group.update(training_data=data, timesteps=timesteps)
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        if (size := peek(self.metrics, EFFECTIVE_SAMPLE_SIZE)) is not None:
            self.sampler.note_effective_sample_size(size)
        return timesteps

    def _sync_weights(self) -> None:
        """Send the learners' weights to every engine, and check the version and the checksum of the weights in each engine."""
        self.weight_version += 1
        self.weights_checksum = self.learner_group.send_weights(self.engine_pool, self.weight_version)
        self._weights_sent = True

    def _record_update(self, timesteps: dict[str, int], weights_before: str) -> None:
        """Write the data that a replay of this update needs besides the trajectories; no effect without ``training_folder``."""
        if (folder := self.config.training_folder) is None:
            return
        UpdateRecord(
            iteration=self.iteration + 1,
            group_ids=self.learner_group.ask(lambda learner: learner.trained_groups)[0],
            timesteps=timesteps,
            num_threads=torch.get_num_threads() if self.learner_group.is_local else None,
            weights_before=weights_before,
            weights_after=self.weights_checksum,
        ).write(folder)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Play the evaluation sets and return their metrics, as RLlib expects; a set that could not be played is omitted.

        Raises:
            UnsupportedError: the algorithm was stopped.
        """
        self._require_running("evaluate")
        self._call_back("on_evaluate_start", metrics_logger=self.metrics)
        self.workers.pop_logged(in_evaluation=True)  # Drop metrics of earlier calls of evaluate_sets().
        with self._phase("evaluation"):
            results = self.evaluate_sets(skip_failed=True)
        counts = {name: result.counts or RolloutCounts() for name, result in results.items()}
        # If an evaluation set is missing, overall rates cannot be compared with other iterations.
        is_complete = len(results) == len(self.evaluation_sets)
        figures: dict[str, Any] = sum(counts.values(), RolloutCounts()).evaluation_metrics() if is_complete else {}
        if len(self.evaluation_sets) > 1:
            figures |= {name: set_counts.evaluation_metrics() for name, set_counts in counts.items()}
        self._log_callbacks(self.workers.pop_logged(in_evaluation=True), in_evaluation=True)
        return self._evaluation_result(figures)

    def evaluate_sets(self, *, skip_failed: bool = False) -> dict[str, EvaluationResult]:
        """Play the configured evaluation sets, one per environment, and return the results by environment name.

        Args:
            skip_failed: whether an evaluation set that could not be played is omitted with a warning, instead of raising.

        Raises:
            ConfigError: no evaluation set is configured.
            UnsupportedError: the algorithm was stopped.
            InfrastructureError: episodes could not be played, or groups that are in flight for training could not be finished.
        """
        self._require_running("evaluate_sets")
        if not self.evaluation_sets:
            raise ConfigError("There is no evaluation set; choose one with .evaluation(evaluation_split=...).")
        self.sampler.finish()  # Errors of training groups are raised even with skip_failed.
        results = {}
        for name, evaluation_set in self.evaluation_sets.items():
            try:
                results[name] = self.evaluate_set(*evaluation_set)
            except InfrastructureError as error:
                if not skip_failed:
                    raise
                # Do not raise: an error in train() would lose the update and the metrics of the iteration.
                logger.warning("iteration %d: no evaluation in %s: %s", self.iteration + 1, name, error)
        return results

    def evaluate_set(self, evaluation_set: EvaluationSet, entry: EnvironmentEntry) -> EvaluationResult:
        """Play one rollout of every task of an evaluation set with the current weights, without changing any training state.

        Args:
            evaluation_set: the tasks.
            entry: one of the config's environments, with the evaluation set's keyword arguments.

        Raises:
            InfrastructureError: episodes could not be played, or groups in flight for training could not be finished.
        """
        self._require_running("evaluate_set")
        self.sampler.finish()
        return play_evaluation_set(self.config, self.workers, evaluation_set, entry)

    def evaluation_protocol(self, evaluation_set: EvaluationSet, entry: EnvironmentEntry) -> dict[str, Any]:
        """Return the evaluation's protocol: all settings besides the policy that determine the result of :meth:`evaluate_set`."""
        return policy_protocol(self.config, evaluation_set, entry)

    # -- reports ---------------------------------------------------------------------------------------------------

    def actor_reports(self) -> dict[str, dict[str, Any] | None]:
        """Return the peak memory of every actor by name, with the usage of engines; ``None`` for an actor that does not answer.

        The fields are those of ``peak_memory`` and ``EngineUsage``. A learner inside this process is reported with the driver.
        """
        actors = self.actors()
        reports = answers([actor.handle.report.remote() for actor in actors], REPORT_TIMEOUT_S)
        driver = "driver and learner" if self.learner_group.is_local else "driver"
        return {driver: peak_memory(), **{actor.name: report for actor, report in zip(actors, reports, strict=True)}}

    def timeline(self) -> Timeline | None:
        """Return the events of all actors in the last iteration; ``None`` before the first iteration."""
        return collect_timeline(self.actors(), REPORT_TIMEOUT_S)

    def matmul_rate(self) -> float:
        """Return the operations per second of a large matrix product, a mean over learners that compute it at the same time."""
        return float(torch.tensor(self.learner_group.ask(lambda learner: learner.matmul_rate())).mean())

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state, the training time, the group sampler's state, the weight version and other state of the run.

        Args:
            args: RLlib's arguments.
            kwargs: RLlib's arguments; with ``inference_only=True`` the state has neither weights nor optimizer state.
        """
        return {
            **super().get_state(*args, **kwargs),
            "time_total_s": self._time_total,
            "tasks": self.sampler.get_state(),
            "weight_version": self.weight_version,
            "health_checks": self.health_checks.get_state(),
            "initial_weights": self.initial_weights,
            "teacher_weights": self.teacher_weights,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`get_state`; weights in the state are sent to the engines.

        Raises:
            CheckpointError: the state is of another model or another teacher model, or has LoRA adapters that were trained on
                another model.
        """
        if (recorded := state.get("teacher_weights", self.teacher_weights)) != self.teacher_weights:
            raise CheckpointError(
                f"teacher_model={self.config.teacher_model!r} has weights with the digest {self.teacher_weights}, but the run's "
                f"teacher had {recorded}. Restore the run's teacher_model, or start a new run."
            )
        if "tasks" in state:
            self.sampler.set_state(state["tasks"])
            self.weight_version = state["weight_version"]
        super().set_state(state)
        if "health_checks" in state:
            self.health_checks.set_state(state["health_checks"])
        if "time_total_s" in state:  # RLlib restores the training time only in trials of Tune.
            self._time_total = state["time_total_s"]
        if "initial_weights" in state:
            compare_initial_weights(self.config, self.initial_weights, state["initial_weights"])
            self.initial_weights = state["initial_weights"]

    def _send_set_weights(self) -> None:
        """Send the engines the weights that the user has set; groups in flight start again, since older weights sampled them."""
        self.sampler.restart()
        self.learner_group.make_room(self.engine_pool)
        self._sync_weights()
