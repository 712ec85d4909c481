"""Configuration of GRPO over turn rows: what TRIAL and every compared method share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from trial_ray.algorithms.rollout_config import RolloutConfig
from trial_ray.environments.skills import check_skills
from trial_ray.errors import ConfigError
from trial_ray.hindsight.privileged_views import VIEWS, offered_views
from trial_ray.learner.method import Method
from trial_ray.learner.update_plan import require_plannable

if TYPE_CHECKING:
    from typing import Self


ADVANTAGE_STATISTICS = ("trajectories", "rows")
REWARDS = ("success", "score", "return")
FLOAT32_GAP = 1e-3
"""Engine and learner in float32 differ by 1e-7 to 1e-5 nats a token; see docs/decisions.md."""
LOW_PRECISION_GAP = 0.1
"""Where one of them computes in bfloat16 or float16; see docs/decisions.md."""


class GRPOConfig(RolloutConfig):
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

    Every public attribute that is not RLlib's own is set in one of the sections below; the defaults are those of the
    published runs unless a docstring says otherwise.

    Other methods derive from this class (``trial_ray/algorithms/methods``): they set ``method_class``, and in
    ``__init__`` their own settings, which ``training`` accepts like the shared ones.
    """

    method_class: ClassVar[type[Method]] = Method

    def __init__(self, algo_class: type | None = None) -> None:
        if algo_class is None:
            from trial_ray.algorithms.grpo import GRPO

            algo_class = GRPO
        super().__init__(algo_class=algo_class)

        # .policy()
        self.model_path: str | None = None
        self.warm_start: dict[str, Any] | None = None
        self.model_dtype = "float32"
        self.compute_dtype: str | None = None
        self.gradient_checkpointing = False

        # .training()
        self.group_size = 8
        self.tasks_per_iteration = 16
        self.minibatch_rows = 256
        self.microbatch_rows = 32
        self.batch_shards = 8
        self.shuffle = False
        self.microbatch_weighting = "rows"
        self.max_tokens_per_forward = 16_384
        self.reward = "success"
        self.reward_scale = 10.0
        self.advantage_statistics = "trajectories"
        self.advantage_epsilon = 1e-6
        self.drop_zero_variance_groups = False
        self.max_refills = 0
        self.invalid_action_penalty = 0.1
        self.clip_low = 0.2
        self.clip_high = 0.2
        self.dual_clip: float | None = 3.0
        self.kl_coeff = 0.01
        self.entropy_coeff = 0.001
        self.weight_decay = 0.01
        self.adam_betas = (0.9, 0.999)
        self.max_logprob_gap: float | None = None
        self.max_skipped_updates = 3
        self.privileged_view: str | None = None
        self.skills: dict[str, str] | None = None
        self.max_outcome_tokens = 512
        self.teacher_sync_iterations: int | None = None

        # RLlib's own settings that differ from its defaults, and why.
        self._set_rllib_defaults()

    def _set_rllib_defaults(self) -> None:
        from trial_ray.rollout.env_runner import TextEnvRunner

        self.env_runner_cls = TextEnvRunner
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        self.num_epochs = 1
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

    # -- fluent sections -------------------------------------------------------------------------------------------

    def policy(
        self,
        *,
        model_path: str | None = NotProvided,
        warm_start: dict[str, Any] | None = NotProvided,
        model_dtype: str = NotProvided,
        compute_dtype: str | None = NotProvided,
        gradient_checkpointing: bool = NotProvided,
    ) -> Self:
        """Choose the language model.

        Args:
            model_path: a Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template.
            warm_start: settings of ``trial_ray.warmstart.WarmStartSettings``; the resulting (cached) model becomes the
                initial policy. Exclusive with ``model_path``.
            model_dtype: dtype of the master weights that the optimizer updates; float32, because bfloat16 cannot
                represent an update of 1e-6.
            compute_dtype: dtype of forward and backward passes (autocast); ``None`` means bfloat16 on a GPU, and elsewhere
                no autocast, as ``"float32"`` does everywhere.
            gradient_checkpointing: recompute activations in the backward pass to save memory.
        """
        return self._assign(
            model_path=model_path,
            warm_start=warm_start,
            model_dtype=model_dtype,
            compute_dtype=compute_dtype,
            gradient_checkpointing=gradient_checkpointing,
        )

    def training(
        self,
        *,
        group_size: int = NotProvided,
        tasks_per_iteration: int = NotProvided,
        minibatch_rows: int = NotProvided,
        microbatch_rows: int = NotProvided,
        batch_shards: int = NotProvided,
        shuffle: bool = NotProvided,
        microbatch_weighting: str = NotProvided,
        max_tokens_per_forward: int = NotProvided,
        reward: str = NotProvided,
        reward_scale: float = NotProvided,
        advantage_statistics: str = NotProvided,
        advantage_epsilon: float = NotProvided,
        drop_zero_variance_groups: bool = NotProvided,
        max_refills: int = NotProvided,
        invalid_action_penalty: float = NotProvided,
        clip_low: float = NotProvided,
        clip_high: float = NotProvided,
        dual_clip: float | None = NotProvided,
        kl_coeff: float = NotProvided,
        entropy_coeff: float = NotProvided,
        weight_decay: float = NotProvided,
        adam_betas: tuple[float, float] = NotProvided,
        max_logprob_gap: float | None = NotProvided,
        max_skipped_updates: int = NotProvided,
        privileged_view: str | None = NotProvided,
        skills: dict[str, str] | None = NotProvided,
        max_outcome_tokens: int = NotProvided,
        teacher_sync_iterations: int | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Set the objective and the optimisation.

        Args:
            group_size: rollouts G per task instance; at least 2.
            tasks_per_iteration: task instances drawn per iteration.
            minibatch_rows: most turn rows in an optimizer step, over all learners; every row is in one step an epoch.
            microbatch_rows: most turn rows over which a token mean and the dense clamp are taken. Neither number depends
                on how many learners there are (see ``learner.update_plan``).
            batch_shards: parts of the batch, in task order, of which each minibatch takes a slice: 8 as in the published
                runs, whose 8 data-parallel ranks held a part each; 1 takes rows in task order.
            shuffle: take the rows of minibatches at random, by the run's seed, and not by ``batch_shards``.
            microbatch_weighting: what a microbatch counts in its minibatch: as much as its share of the ``"rows"``, or
                ``"equal"`` to the others, as in the published runs.
            max_tokens_per_forward: memory limit of one forward pass, in tokens; never changes the loss.
            reward: what R_i is: ``"success"`` (0 or 1), the environment's ``"score"``, or its ``"return"``.
            reward_scale: factor on the reward.
            advantage_statistics: mean and deviation over ``"trajectories"`` (Eq. 1) or over turn ``"rows"``.
            advantage_epsilon: added to the standard deviation.
            drop_zero_variance_groups: leave out groups in which every rollout earned the same.
            max_refills: with ``drop_zero_variance_groups``, times in an iteration that further tasks are drawn in place of
                the groups that were left out (dynamic sampling).
            invalid_action_penalty: taken off the reward of a turn whose response lacks the required form, in the units of
                the scaled reward; in a group without variance it is taken off the turn's advantage as it is.
            clip_low: lower clip of the probability ratio is ``1 - clip_low``.
            clip_high: upper clip of the probability ratio is ``1 + clip_high``.
            dual_clip: bound on the surrogate for negative advantages; ``None`` switches it off.
            kl_coeff: weight of the k3 KL to the frozen initial policy; 0 loads no reference model.
            entropy_coeff: weight of the entropy bonus.
            weight_decay: of AdamW.
            adam_betas: of AdamW.
            max_logprob_gap: mean absolute difference between engine and learner log-probabilities, in nats, above which
                nothing is trained and the run stops, because the engine sampled from another policy; ``None``:
                ``FLOAT32_GAP`` where both compute in float32, else ``LOW_PRECISION_GAP``.
            max_skipped_updates: optimizer steps in a row that may be skipped for non-finite gradients.
            privileged_view: what the method's second view of a turn shows besides the prompt: ``"outcome"`` (what the
                action led to), ``"feedback"`` (the same as immediate feedback), ``"skill"`` (advice on the task's
                family), ``"solution"`` (the environment's own), or ``None`` where the method needs no second view.
            skills: advice that the ``"skill"`` view shows, by family (``info["family"]``), and under ``""`` for all others;
                ``None``: that of the environment, where it has some.
            max_outcome_tokens: longest privileged text, in tokens; longer ones lose their middle, which is marked.
            teacher_sync_iterations: iterations after which a lagged copy of the policy, which scores the privileged view,
                takes its weights; ``None``: the policy before the update scores it.
            kwargs: the method's own settings, and RLlib's (``lr``, ``grad_clip``, ``num_epochs``, ...).
        """
        own = vars(type(self)()).keys() - vars(GRPOConfig()).keys()
        self._assign(**{name: kwargs.pop(name) for name in own & kwargs.keys()})
        super().training(**kwargs)
        return self._assign(
            group_size=group_size,
            tasks_per_iteration=tasks_per_iteration,
            minibatch_rows=minibatch_rows,
            microbatch_rows=microbatch_rows,
            batch_shards=batch_shards,
            shuffle=shuffle,
            microbatch_weighting=microbatch_weighting,
            max_tokens_per_forward=max_tokens_per_forward,
            reward=reward,
            reward_scale=reward_scale,
            advantage_statistics=advantage_statistics,
            advantage_epsilon=advantage_epsilon,
            drop_zero_variance_groups=drop_zero_variance_groups,
            max_refills=max_refills,
            invalid_action_penalty=invalid_action_penalty,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            kl_coeff=kl_coeff,
            entropy_coeff=entropy_coeff,
            weight_decay=weight_decay,
            adam_betas=adam_betas,
            max_logprob_gap=max_logprob_gap,
            max_skipped_updates=max_skipped_updates,
            privileged_view=privileged_view,
            skills=skills,
            max_outcome_tokens=max_outcome_tokens,
            teacher_sync_iterations=teacher_sync_iterations,
        )

    # -- what RLlib asks for ---------------------------------------------------------------------------------------

    def get_default_learner_class(self) -> type:
        """Return the learner that computes this method's loss."""
        from trial_ray.learner.grpo_learner import GRPOLearner

        return GRPOLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the spec of the causal LM that is trained."""
        from trial_ray.models.causal_lm_module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {
            "model_path": self.model_path,
            "model_dtype": self.model_dtype,
            "compute_dtype": self.compute_dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            "with_reference": self.kl_coeff > 0,
            "with_teacher": self.teacher_sync_iterations is not None,
        }

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: a key is unknown or a value is out of range; the message names it and what is expected.
        """
        super().validate()
        if self.group_size < 2:
            raise ConfigError(
                f"group_size is {self.group_size}, but group-relative advantages need at least 2 rollouts of a task."
            )
        self._require_at_least(
            1, "tasks_per_iteration", "minibatch_rows", "microbatch_rows", "max_tokens_per_forward", "num_epochs",
            "max_skipped_updates", "max_outcome_tokens",
        )  # fmt: skip
        self._require_at_least(
            0, "kl_coeff", "entropy_coeff", "invalid_action_penalty", "clip_high", "max_refills", "weight_decay"
        )
        self._require_above(0, "advantage_epsilon", "reward_scale")
        self._require_within(0, 1, "clip_low")
        self._require_one_of("advantage_statistics", ADVANTAGE_STATISTICS)
        self._require_one_of("reward", REWARDS)
        self._validate_update()
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}, expected a value above 1, or None.")
        if (self.model_path is None) == (self.warm_start is None):
            raise ConfigError(
                "Choose the policy with exactly one of .policy(model_path=...) and .policy(warm_start=...)."
            )
        self._validate_views()

    def _validate_update(self) -> None:
        require_plannable(self.minibatch_rows, self.microbatch_rows, self.batch_shards, self.microbatch_weighting)
        if self.num_learners > (most := self.tasks_per_iteration * self.group_size):
            raise ConfigError(
                f"num_learners is {self.num_learners}, but an iteration samples at most {most} trajectories "
                "(tasks_per_iteration times group_size); expected at least one for each learner."
            )
        if self.max_refills and not self.drop_zero_variance_groups:
            raise ConfigError("max_refills is set, but nothing is left out: set drop_zero_variance_groups too.")
        if self.max_logprob_gap is not None:
            self._require_above(0, "max_logprob_gap")
        if self.minibatch_size is not None:
            raise ConfigError("Set minibatch_rows (turn rows over all learners), not RLlib's minibatch_size.")
        if self.shuffle_batch_per_epoch:
            raise ConfigError("Set shuffle, not RLlib's shuffle_batch_per_epoch.")

    def logprob_gap_limit(self) -> float:
        """Largest mean difference between engine and learner at which training goes on, in nats."""
        if self.max_logprob_gap is not None:
            return self.max_logprob_gap
        learner = self.compute_dtype or ("bfloat16" if self.num_gpus_per_learner else "float32")
        return FLOAT32_GAP if {learner, self.engine_dtype()} == {"float32"} else LOW_PRECISION_GAP

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

    def _require_view(self) -> None:
        if self.privileged_view is None:
            raise ConfigError(
                f"{type(self).__name__} needs a second view of each turn; set privileged_view, for example to 'outcome'."
            )

    def _validate_views(self) -> None:
        self._require_one_of("privileged_view", (None, *VIEWS))
        if self.skills is not None:
            check_skills(self.skills)
        offered = offered_views(str(self.env), self.skills)
        if self.privileged_view is not None and self.privileged_view not in offered:
            raise ConfigError(
                f"{self.env} offers no {self.privileged_view!r} view; choose privileged_view from {', '.join(offered)}, or "
                'give the advice with .training(skills={family: text, "": general text}).'
            )
        if self.teacher_sync_iterations is not None:
            self._require_at_least(1, "teacher_sync_iterations")
            if self.privileged_view is None:
                raise ConfigError("teacher_sync_iterations is set, but without a privileged_view no teacher is asked.")
