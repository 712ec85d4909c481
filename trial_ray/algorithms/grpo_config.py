"""Configuration of GRPO over turn rows: what TRIAL and every compared method share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from trial_ray.algorithms.colocation import check_colocation, learner_placement_group
from trial_ray.algorithms.environment_config import EnvironmentConfig
from trial_ray.algorithms.guards import GuardSettings
from trial_ray.algorithms.settings import RecoverySettings
from trial_ray.errors import ConfigError
from trial_ray.evaluation.settings import EvaluationSettings
from trial_ray.learner.settings import LearnerSettings
from trial_ray.settings import set_defaults

if TYPE_CHECKING:
    from ray.rllib.core.learner.learner_group import LearnerGroup
    from ray.util.placement_group import PlacementGroup


class GRPOConfig(LearnerSettings, GuardSettings, EvaluationSettings, RecoverySettings, EnvironmentConfig):
    """Group-relative policy optimisation of a language-model agent in a text environment.

    .. code-block:: python

        config = (
            GRPOConfig()
            .environment("trial/ALFWorld-v0", env_config={"split": "train"})
            .policy(model_path="Qwen/Qwen3-1.7B")
            .training(lr=1e-6, group_size=8, tasks_per_iteration=16)
            .engines(engine="vllm", num_engines=1)
        )
        algo = config.build_algo()

    Every setting that is not RLlib's own is a field of one of the bases and set by its section; the defaults are those of
    the published runs unless a documentation says otherwise.

    Other methods derive from this class (``trial_ray/algorithms/methods``): they set ``method_class``, and declare settings
    of their own, which ``training`` takes like the shared ones.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        if algo_class is None:
            from trial_ray.algorithms.grpo import GRPO

            algo_class = GRPO
        super().__init__(algo_class=algo_class)
        self._set_rllib_defaults()
        set_defaults(self)

    def _set_rllib_defaults(self) -> None:
        """Set what differs from RLlib's defaults, and say why."""
        from trial_ray.rollout.env_runner import TextEnvRunner

        self.env_runner_cls = TextEnvRunner
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        self.num_env_runners = 1
        # The driver holds no environment: all stepping happens in env-runner actors.
        self.create_local_env_runner = False
        # The default pieces expect RLlib episodes; ours turn trajectory groups into turn rows.
        self.add_default_connectors_to_learner_pipeline = False
        # Nothing of an env runner's state is learned, so nothing needs merging or broadcasting.
        self.merge_env_runner_states = False
        self.broadcast_env_runner_states = False
        self._dont_auto_sync_env_runner_states = True
        # RLlib's 60 s would silently drop slow rollouts.
        self.sample_timeout_s = 3600.0
        self.restart_failed_env_runners = True
        self.delay_between_env_runner_restarts_s = 1.0
        self.log_sys_usage = False

    # -- what RLlib asks for ---------------------------------------------------------------------------------------

    def get_default_learner_class(self) -> type:
        """Return the learner that computes this method's loss."""
        from trial_ray.learner.grpo_learner import GRPOLearner

        return GRPOLearner

    def build_learner_group(self, *, placement_group: PlacementGroup | None = None, **kwargs: Any) -> LearnerGroup:
        """Build the learners, where they share devices with engines in the placement group of the pairs."""
        group: LearnerGroup = super().build_learner_group(
            placement_group=placement_group or learner_placement_group(), **kwargs
        )
        return group

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the spec of the causal LM that is trained."""
        from trial_ray.models.causal_lm_module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        included: dict[str, Any] = super()._model_config_auto_includes
        return included | {
            "model_path": self.model_path,
            "model_dtype": self.model_dtype,
            "compute_dtype": self.compute_dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            "lora": self.lora_settings(),
            "with_reference": self.kl_coeff > 0,
            "with_teacher": self.teacher_sync_iterations is not None,
        }

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: a key is unknown or a value is out of range; the message names it and what is expected.
        """
        super().validate()
        self.check_policy()
        self.check_sampling()
        self.check_panel()
        self.engine_dtype()
        self.check_engines()
        check_colocation(self)
        self.check_update()
        self.check_overlap()
        self.check_view()
        self.check_teacher()
        self._check_rllib()
        self.check_environments()

    def _check_rllib(self) -> None:
        """Settings of RLlib's that ours replace, or that must fit to ours."""
        if isinstance(self.seed, int) and self.seed < 0:  # else Tune has still to choose it
            raise ConfigError(f"seed is {self.seed}, expected an int of at least 0, or None. Set .debugging(seed=0).")
        if self.num_learners > (most := self.tasks_per_iteration * self.group_size):
            raise ConfigError(
                f"num_learners is {self.num_learners}, but an iteration samples at most {most} trajectories "
                "(tasks_per_iteration times group_size); expected at least one for each learner."
            )
        # RLlib's copy for evaluation has no env runners of its own.
        if self.max_staleness and not self.num_env_runners and not self.in_evaluation:
            raise ConfigError(
                f"max_staleness is {self.max_staleness}, but num_env_runners is 0: this process would have to play and to "
                "update at once. Set .env_runners(num_env_runners=1) or more."
            )
        if self.minibatch_size is not None:
            raise ConfigError("Set minibatch_rows (turn rows over all learners), not RLlib's minibatch_size.")
        if self.shuffle_batch_per_epoch:
            raise ConfigError("Set shuffle, not RLlib's shuffle_batch_per_epoch.")

    def schedules(self) -> dict[str, int]:
        """Iterations that the method's schedule needs to take effect, by the setting that says so."""
        return {}

    def unfinished_schedules(self, iterations: float) -> list[str]:
        """What is wrong with each schedule that training for ``iterations`` would not reach the end of."""
        return [
            f"{name} is {needed}, but training ends after iteration {iterations:g}: the schedule would not be completed. "
            f"Set {name} to at most {iterations:g}, or train longer."
            for name, needed in self.schedules().items()
            if needed > iterations
        ]

    def require_schedules_within(self, iterations: float) -> None:
        """Refuse a schedule that training would not reach the end of.

        Raises:
            ConfigError: a schedule needs more than ``iterations``; the message names both numbers.
        """
        for complaint in self.unfinished_schedules(iterations):
            raise ConfigError(complaint)
