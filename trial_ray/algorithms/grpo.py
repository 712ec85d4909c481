"""GRPO as an RLlib algorithm: sample groups → update → sync weights → evaluate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.util import get_current_placement_group

from trial_ray.algorithms.batch_sampler import BatchSampler
from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.algorithms.initial_policy import initial_policy
from trial_ray.algorithms.task_sampler import TaskSampler
from trial_ray.environments.check import check_environment
from trial_ray.environments.entry import EnvironmentEntry
from trial_ray.errors import ConfigError
from trial_ray.evaluation.panel import Panel
from trial_ray.evaluation.panel_player import PanelPlayer
from trial_ray.evaluation.results import EvaluationResult, Rate
from trial_ray.inference.pool import EnginePool, require_engine
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.rollout.requests import GroupSample
from trial_ray.rollout.trajectory import EpisodeResult
from trial_ray.rollout.workers import RolloutWorkers, create_engines

logger = logging.getLogger(__name__)


class GRPO(Algorithm):
    """Group-relative policy optimisation of a language-model agent.

    Actors: env runners play episodes, engines sample responses, learners (one of them inside this process by default) update
    the policy. This process only moves references and numbers.
    """

    config: GRPOConfig

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        """Default configuration."""
        return GRPOConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """RLlib's bundles, then one for each engine: a Tune trial reserves its engines too."""
        base = super().default_resource_request(config)
        full: GRPOConfig = cls.get_default_config().update_from_dict(config) if isinstance(config, dict) else config
        return PlacementGroupFactory(
            base.bundles + [_engine_bundle(full)] * full.num_engines, strategy=full.placement_strategy
        )

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: Any) -> bool:
        # The training runners play the panel between two iterations: same engines, no second set of actors.
        return False

    # -- life cycle ------------------------------------------------------------------------------------------------

    def setup(self, config: Any) -> None:
        """Check what the user asked for before any actor starts; then start engines, runners and learners."""
        require_engine(self.config.engine)
        self.tasks = self._list_tasks()
        self.panels = self._choose_panels()
        self._resolve_policy()
        self.weight_version = 0
        # Before RLlib's own actors, so that no unpinned learner can take an engine's bundle.
        self.engine_pool = self._create_engine_pool()
        try:
            super().setup(config)
            self.engine_pool.start(self.config.engine_start_timeout_s)
            self.workers = RolloutWorkers(self.config, self.env_runner_group, self.engine_pool)
            self.sampler = BatchSampler(
                self.config,
                self.tasks,
                self.workers,
                lambda metrics: self.metrics.aggregate(metrics, key=ENV_RUNNER_RESULTS),
            )
            self._sync_weights()
        except BaseException:
            self.engine_pool.stop()
            raise

    def _list_tasks(self) -> TaskSampler:
        config = self.config
        entries = config.environment_entries()
        tasks = [entry.tasks() for entry in entries]
        for entry, listed in zip(entries, tasks, strict=True):
            if listed:
                check_environment(
                    entry,
                    listed,
                    style=config.prompt_style,
                    reward=config.reward,
                    privileged_view=config.privileged_view,
                )
        return TaskSampler(tasks, config.seed or 0, [entry.weight for entry in entries])

    def _choose_panels(self) -> dict[str, tuple[Panel, EnvironmentEntry]]:
        """The configured panels, and what each is played in, by the name of the environment."""
        return {
            entry.name: (Panel.from_entry(entry, self.config.panel_num_tasks, self.config.panel_seed), entry)
            for entry in self.config.panel_entries()
        }

    def _resolve_policy(self) -> None:
        """Turn warm-start settings, a hub name or a packaged model's name into a folder (made or fetched once)."""
        path = initial_policy(self.config)
        if path != self.config.model_path:
            self.config = self.config.copy(copy_frozen=False).policy(model_path=path, warm_start=None)
            self.config.freeze()

    def _create_engine_pool(self) -> EnginePool:
        offset = None
        if get_current_placement_group() is not None:
            offset = len(type(self).default_resource_request(self.config).bundles) - self.config.num_engines
        return create_engines(self.config, offset)

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Give restarted env runners their engines again; they hold nothing else that was learned."""
        return self.workers.restore_runners()

    def cleanup(self) -> None:
        """Stop every actor."""
        if hasattr(self, "engine_pool"):
            self.engine_pool.stop()
        super().cleanup()

    # -- one iteration ---------------------------------------------------------------------------------------------

    def training_step(self) -> None:
        """Sample groups of rollouts, update on them, send the new weights to the engines."""
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER), reduce="mean"):
            batch = self.sampler.sample(self.iteration + 1)
        if batch.kept:
            with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER), reduce="mean"):
                self._update(batch.kept)
            with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER), reduce="mean"):
                self._sync_weights()
        else:
            logger.warning("iteration %d trained nothing: %s", self.iteration + 1, batch.reason)
        for key, counts in batch.metrics().items():
            self.metrics.log_dict(counts, key=key, reduce="sum")
        samples = [*batch.kept, *batch.left_out]
        zero_variance = sum(sample.zero_variance for sample in samples) / len(samples)
        self.metrics.log_value(("groups", "zero_variance_fraction"), zero_variance, window=1)

    def _update(self, samples: list[GroupSample]) -> None:
        results = self.learner_group.update(
            training_data=TrainingGroups(episodes_refs=[sample.ref for sample in samples]),
            timesteps={
                NUM_ENV_STEPS_SAMPLED_LIFETIME: self.metrics.peek(
                    (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0
                ),
                "training_iteration": self.iteration + 1,
            },
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)

    def _sync_weights(self) -> None:
        """Send the learner's weights to every engine, confirmed by version and checksum."""
        self.weight_version += 1
        version, dtype = self.weight_version, self.config.engine_dtype()
        exports = self._ask_learners(lambda learner: learner.export_weights(version, dtype))
        self.engine_pool.sync(next(shards for shards in exports if shards is not None))

    def _ask_learners(self, function: Callable[[Any], Any]) -> list[Any]:
        """What every learner answers; RLlib would hand over an error as an answer."""
        answers = []
        for result in self.learner_group.foreach_learner(function):
            if not result.ok:
                raise result.get()
            answers.append(result.get())
        return answers

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """RLlib's evaluation hook: play the panel, return its rates."""
        results = self.evaluate_panels()
        rates = _rates([episode for result in results.values() for episode in result.counted])
        if len(results) > 1:
            rates |= {name: _rates(result.counted) for name, result in results.items()}
        return {ENV_RUNNER_RESULTS: rates}

    def evaluate_panels(self) -> dict[str, EvaluationResult]:
        """Play the configured panels, one an environment; results by the environments' names.

        Raises:
            ConfigError: no panel is configured.
            InfrastructureError: episodes could not be played.
        """
        if not self.panels:
            raise ConfigError("No panel is configured; choose one with .panel(split=..., num_tasks=...).")
        return {name: self.evaluate_panel(*panel) for name, panel in self.panels.items()}

    def evaluate_panel(self, panel: Panel, entry: EnvironmentEntry) -> EvaluationResult:
        """Play one rollout of every task of a panel with the current weights, without touching any training state.

        Args:
            panel: the tasks.
            entry: one of the config's environments, with the panel's keyword arguments.

        Raises:
            InfrastructureError: episodes could not be played.
        """
        return PanelPlayer(self.config, self.workers).play(panel, entry, self.iteration)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, the position in the task list, and the weights' version."""
        return {
            **super().get_state(*args, **kwargs),
            "tasks": self.tasks.get_state(),
            "weight_version": self.weight_version,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken."""
        super().set_state(state)
        if "tasks" in state:
            self.tasks.set_state(state["tasks"])
            self.weight_version = state["weight_version"]

    def save_to_path(self, path: str | Path | None = None, **kwargs: Any) -> str:
        """RLlib asks one learner to write; sharded weights are written by all of them together.

        Raises:
            CheckpointError: not every learner sees the folder.
        """
        folder: str = super().save_to_path(path, **kwargs)
        if self.config.sharding != "none":
            learner_folder = Path(folder) / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER
            self._ask_learners(lambda learner: learner.save_shards(learner_folder))
        return folder

    def restore_from_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Restore, then send the restored weights to the engines, which still hold the initial ones."""
        super().restore_from_path(path, *args, **kwargs)
        self._sync_weights()


def _rates(episodes: Sequence[EpisodeResult]) -> dict[str, Any]:
    overall = Rate.of(episodes)
    return {
        "success_rate": overall.rate,
        "score_mean": overall.score,
        "episode_len_mean": overall.turns,
        "num_episodes": overall.episodes,
    }


def _engine_bundle(config: GRPOConfig) -> dict[str, float]:
    bundle = {"CPU": config.num_cpus_per_engine}
    if config.num_gpus_per_engine:
        bundle["GPU"] = config.num_gpus_per_engine
    return bundle
