"""The learner of every method: updates, checkpoints, weight export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core import ALL_MODULES, COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.metrics import (
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_MODULE_STEPS_TRAINED,
    NUM_MODULE_STEPS_TRAINED_LIFETIME,
)
from ray.rllib.utils.torch_utils import clip_gradients
from torch import Tensor, nn

from trial_ray.config.run import RunSettings
from trial_ray.engines.link import Engines
from trial_ray.engines.transfer import ObjectStoreSender, weight_sender
from trial_ray.engines.weights import TEXT_FACTOR, TextLogprobs, Weights, text_ids
from trial_ray.errors import CheckpointError, PolicyBrokenError, TrainingDivergedError, refusing
from trial_ray.learner.connectors import call_connectors
from trial_ray.learner.exchange import GradientSums, LearnerExchange, TrainingGroups, fetch_groups, training_refs
from trial_ray.learner.loss import WeightedMeans, means, microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.passes import MicrobatchPasses, TokenCounts
from trial_ray.learner.recording import write_training
from trial_ray.learner.rows import TokenBatch, TurnRows
from trial_ray.learner.scoring import Scoring
from trial_ray.learner.state import load_optimizers, new_optimizer, save_optimizers, save_shards, state_tensors
from trial_ray.learner.update_plan import Microbatch, UpdatePlan
from trial_ray.metrics import LEARNER, log, log_time
from trial_ray.models.module import CausalLMModule, compute_dtype, matmul_rate
from trial_ray.models.sharding import gathered, local_part
from trial_ray.models.tensors import from_arrays, require_fitting, to_arrays
from trial_ray.process import announce, event, peak_memory
from trial_ray.trajectory import TrajectoryGroup

SAVED_ATTRIBUTES = {"iteration", "env_steps", "teacher_renewed_in", "skipped_in_a_row"}
"""Attributes of the learner that updates change and checkpoints contain, besides weights and optimizer state."""
ONE_MODULE = "one policy is trained, and engines sample from it"


@refusing({"add_module remove_module": ONE_MODULE})
class GRPOLearner(TorchLearner):
    """Learner of every method: trains on turns ("rows") with a clipped surrogate and the terms of the config's method.

    An update computes the log-probabilities of all rows once, then takes the optimizer steps of its ``UpdatePlan``. A minibatch
    consists of microbatches of up to ``microbatch_rows`` rows. The loss of a microbatch is weighted, by default by the number
    of its rows that have a token to learn from. With several learners, each computes log-probabilities for its share of
    the trajectories and gradients for its share of the microbatches, and the learners exchange both. Gradients are summed, by this
    class or by FSDP, and not averaged as by torch's DDP, because the learners' shares have different sizes.
    """

    config: RunSettings

    def build(self) -> None:
        """Build the module, the optimizer and the objects that an update needs."""
        super().build()
        self.method: Method[Any] = self.config.method_class(self.config)
        self.iteration = 0
        self.env_steps = 0
        """Environment steps sampled up to the last update, on which a schedule of the learning rate depends."""
        self.weight_version: int | None = None
        self.skipped_in_a_row = 0
        self.teacher_renewed_in = 0
        """Latest iteration in which the policy's weights were copied into the stale teacher (an earlier policy); 0 if in none."""
        self.trained_groups: list[str] = []
        """Ids of the groups of the last update, in order."""
        self.exchange = LearnerExchange(self.config.num_learners, self.device)
        self.sender = weight_sender(
            self.config.transfer_backend(), self.exchange.rank, self.config.workers_per_engine()
        )
        self.means = WeightedMeans()
        summed = self.exchange.num_learners > 1 and self.policy_module.sharded is None
        self.gradient_sums = GradientSums(self.get_parameters(self.policy_module) if summed else [])
        self.passes = MicrobatchPasses(
            self.policy_module, self.method, self.means, before_last=self.gradient_sums.begin
        )
        self.scoring = Scoring(self.method, self.policy_module, self.exchange, self.metrics)
        announce(self.config.stall_timeout_s)

    def _make_modules_ddp_if_necessary(self) -> None:
        """Do not wrap the module in DDP; the class docstring gives the reason."""

    def _map_module_to_device(self, module: MultiRLModule) -> None:
        """Load the weights onto the device, sharded if the config requires it."""
        policy: CausalLMModule = module[DEFAULT_MODULE_ID].unwrapped()
        policy.load(torch.device(self.device), sharded=self.config.sharding == "fsdp", fsdp_size=self.config.fsdp_size)
        super()._map_module_to_device(module)

    @property
    def policy_module(self) -> CausalLMModule:
        """The trained module."""
        return self.module[DEFAULT_MODULE_ID].unwrapped()

    def get_parameters(self, module: RLModule) -> list[nn.Parameter]:
        """Return the parameters that the optimizer updates: the adapter's, or all of the policy's (tied parameters once)."""
        policy: CausalLMModule = module.unwrapped()
        return [parameter for parameter in policy.lm.parameters() if parameter.requires_grad]

    def configure_optimizers_for_module(self, module_id: str, config: RunSettings) -> None:
        """Register AdamW, the optimizer of the TRIAL paper's runs."""
        parameters = self.get_parameters(self.module[module_id])
        optimizer = new_optimizer(parameters, config.adam_betas, config.weight_decay)
        # register_optimizer() sets the learning rate; if lr is a schedule over environment steps, each update sets it again.
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=config.lr
        )

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Set the update's iteration, environment steps and weight version; copy the policy into the stale teacher when due."""
        super().before_gradient_based_update(timesteps=timesteps)
        self.iteration = timesteps.get("training_iteration", self.iteration + 1)
        self.env_steps = timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0)
        self.weight_version = timesteps.get("weight_version")
        period = self.config.teacher_sync_iterations
        # Do not test for a remainder of 0: if the iteration in which a copy is due has no update, the next update must copy.
        if period and (self.iteration - 1) // period != (self.teacher_renewed_in - 1) // period:
            self.policy_module.renew_teacher()
            self.teacher_renewed_in = self.iteration

    def update(
        self,
        training_data: TrainingGroups | None = None,
        *,
        episodes: list[TrajectoryGroup] | None = None,
        timesteps: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Train ``num_epochs`` times on every turn of the groups' completed rollouts, and return the metrics.

        Args:
            training_data: references to the groups, the same for all learners.
            episodes: the groups themselves, instead of ``training_data``.
            timesteps: ``training_iteration`` (counted from 1), ``weight_version`` (the engines' version of the weights before
                the update), and RLlib's count of sampled environment steps, for schedules.
            kwargs: RLlib's other arguments, which must be empty, because the config determines epochs and minibatches.

        Raises:
            UnsupportedError: there are neither ``training_data`` nor ``episodes``, or another argument has a value.
            CallbackError: a learner connector raised an error.
            WeightSyncError: the engine sampled from another policy; nothing was trained.
            TrainingDivergedError: gradients were not finite too many times in a row, or advantages are not finite.
            PolicyBrokenError: the weights, or log-probabilities computed with them, are not finite.
            InfrastructureError: groups did not arrive in time, or all were lost with the env runners that sampled them.
        """
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        refs = training_refs(training_data, episodes, kwargs)
        groups = episodes or fetch_groups(refs, self.exchange)
        num_lost = max(0, len(refs) - len(groups))
        with log_time(self.metrics, f"{LEARNER}scoring/seconds"), event("scoring"):
            call_connectors(self._learner_connector, groups, self.module, self.metrics)
            rows, plan = self.scoring.scored_rows(groups, self.iteration, self.weight_version)
        with log_time(self.metrics, f"{LEARNER}update/seconds"):
            losses, num_rows = self._optimizer_steps(rows, plan)
        self._require_finite_weights()
        first = [batch for minibatch in plan.steps[:1] for batch in minibatch if batch.learner == self.exchange.rank]
        if self.method.needs_scores:
            self.passes.measure_update(first)
        self._log_update(losses, num_rows, num_lost)
        self.trained_groups = [group.group_id for group in groups]
        # Each learner records the turns that it scored, so every turn is recorded once.
        folder, share = self.config.training_folder, plan.scoring[self.exchange.rank]
        if folder is not None and len(share) and len(rows.turn_ids) <= self.config.max_recorded_tokens:
            write_training(folder, self.iteration, groups, rows, share, f"learner{self.exchange.rank:03d}")
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    def _optimizer_steps(self, rows: TurnRows, plan: UpdatePlan) -> tuple[list[float], dict[str, int]]:
        """Take the plan's steps; return this learner's loss in each step, and the numbers of its trained and skipped rows."""
        losses: list[float] = []
        num_rows = {"trained": 0, "skipped": 0}
        num_tokens = 0
        for minibatch in plan.steps:
            microbatches = tuple(microbatch for microbatch in minibatch if microbatch.learner == self.exchange.rank)
            own_rows = [int(row) for microbatch in microbatches for row in microbatch.rows]
            with event("optimizer step", rows=len(own_rows)):
                loss, applied = self._optimizer_step(rows, microbatches)
            losses.append(loss)
            num_rows["trained" if applied else "skipped"] += len(own_rows)
            num_tokens += sum(rows.turns[row].num_tokens for row in own_rows) if applied else 0
        log(self.metrics, f"{LEARNER}update/tokens_trained", num_tokens)
        return losses, num_rows

    def _optimizer_step(self, rows: TurnRows, microbatches: Sequence[Microbatch]) -> tuple[float, bool]:
        """Add up the gradients of all learners' microbatches, and take an optimizer step with them if they are finite.

        Returns:
            The weighted loss of this learner's microbatches, and whether the step was taken.
        """
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        loss = self.passes.backward(rows, microbatches, self.iteration)
        self.policy_module.finish_passes()
        gradients = self._exchanged_gradients()
        if applied := self._finite(gradients):
            self.apply_gradients(self.postprocess_gradients(gradients))
        return loss, applied

    def _exchanged_gradients(self) -> dict[Any, Tensor]:
        """Return the gradients added up over all learners; a learner without microbatches adds zeros."""
        self.gradient_sums.finish()
        # FSDP has added up the gradients of the learners that share a copy of the model; add up the copies' gradients.
        if (sharded := self.policy_module.sharded) is not None and sharded.copies_group is not None:
            for parameter in self._params.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts = [local_part(parameter.grad) for parameter in self._params.values()]
            self.exchange.add_up(parts, sharded.copies_group)
        return {ref: parameter.grad for ref, parameter in self._params.items() if parameter.grad is not None}

    def apply_gradients(self, gradients_dict: dict[Any, Tensor]) -> None:
        """Take the optimizer's step with gradients that were checked to be finite."""
        for ref, gradient in gradients_dict.items():
            self._params[ref].grad = gradient
        for optimizer in self._named_optimizers.values():
            optimizer.step()

    @staticmethod
    def _get_clip_function() -> Callable[..., Tensor | None]:
        """Return RLlib's function for clipping gradients, wrapped to return the norm over all shards, which RLlib logs."""

        def clip(*args: Any, **kwargs: Any) -> Tensor | None:
            norm = clip_gradients(*args, **kwargs)
            return None if norm is None else gathered(norm)

        return clip

    def compute_loss_for_module(
        self, *, module_id: str, config: RunSettings, batch: TokenBatch, fwd_out: dict[str, Tensor]
    ) -> Tensor:
        """Compute the loss of a whole microbatch, shape (), for RLlib's interface; updates use :class:`MicrobatchPasses`."""
        return microbatch_loss(self.method, batch, fwd_out, self.iteration)[0]

    def _log_update(self, losses: list[float], num_rows: dict[str, int], num_lost: int) -> None:
        """Log the metrics of the update; each mean is over all learners, and equal on all of them."""
        for name, value in means(self.exchange.gather(self.means.pop())).items():
            log(self.metrics, f"{LEARNER}{name}", value)
        tokens, self.passes.counts = self.passes.counts, TokenCounts()
        counts: dict[str, float] = {
            NUM_MODULE_STEPS_TRAINED: num_rows["trained"],
            NUM_MODULE_STEPS_TRAINED_LIFETIME: num_rows["trained"],
            "update/tokens_forwarded": tokens.forwarded,
            "update/tokens_distinct": tokens.distinct,
            "rows/skipped": num_rows["skipped"],
            "rows/lost_groups": num_lost if self.exchange.rank == 0 else 0,
        }
        if losses:
            counts[self.TOTAL_LOSS_KEY] = sum(map(sum, self.exchange.gather(losses))) / len(losses)
        for name, count in counts.items():
            log(self.metrics, f"{LEARNER}{name}", count)
        # RLlib reads the numbers of trained rows under ALL_MODULES, as totals over modules; this learner has only one module.
        for name, kind in ((NUM_MODULE_STEPS_TRAINED, "sum"), (NUM_MODULE_STEPS_TRAINED_LIFETIME, "lifetime_sum")):
            self.metrics.log_value((ALL_MODULES, name), num_rows["trained"], reduce=kind)

    def _finite(self, gradients: dict[Any, Tensor]) -> bool:
        """Return whether all gradients are finite; if not, count the skipped optimizer step.

        All learners return the same value: their gradients are equal or, if sharded, the learners combine their results.

        Raises:
            TrainingDivergedError: too many steps in a row were skipped (``PolicyBrokenError`` if the policy is not finite).
        """
        finite = all(bool(torch.isfinite(local_part(gradient)).all()) for gradient in gradients.values())
        if self.policy_module.sharded is not None:
            finite = all(self.exchange.gather(finite))
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        # `passes.broken` describes the current weights, so reset it if an optimizer step will change them.
        self.passes.broken = self.passes.broken and not finite
        log(self.metrics, f"{LEARNER}skipped_updates", int(not finite and self.exchange.rank == 0))
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            self._require_finite_weights()
            if any(self.exchange.gather(self.passes.broken)):
                raise PolicyBrokenError(
                    f"The weights give log-probabilities that are not finite, in {self.skipped_in_a_row} updates in a row, so they "
                    "are neither saved nor sent to the engines. Lower lr, and continue from the last checkpoint."
                )
            raise TrainingDivergedError(
                f"Gradients were not finite in {self.skipped_in_a_row} updates in a row. Lower lr, or check the rewards; "
                "the weights are still those before the first of them."
            )
        return finite

    def _require_finite_weights(self) -> None:
        """Reject weights that are not finite, so that they reach neither engines nor checkpoints.

        Raises:
            PolicyBrokenError: weights are not finite.
        """
        weights = [local_part(parameter.detach()) for parameter in self._params.values()]
        # Combine the flags on the device, so that a single transfer to the host is enough.
        finite = bool(torch.stack([weight.isfinite().all() for weight in weights]).all())
        if not all(self.exchange.gather(finite)):
            raise PolicyBrokenError(
                f"Weights are not finite after the update of iteration {self.iteration}, so they are neither saved nor sent to "
                "the engines. Lower lr, and continue from the last checkpoint."
            )

    def apply_optimizer_settings(self, env_steps: int) -> None:
        """Set the optimizers' learning rate, betas and weight decay from the config, in place of a checkpoint's values.

        Args:
            env_steps: environment steps sampled up to the last update, for a schedule of the learning rate.
        """
        for optimizer in self._named_optimizers.values():
            for group in optimizer.param_groups:
                group |= {"betas": tuple(self.config.adam_betas), "weight_decay": self.config.weight_decay}
            self._set_optimizer_lr(optimizer, lr=self._optimizer_lr_schedules[optimizer].update(timestep=env_steps))

    def report(self) -> dict[str, Any]:
        """Return the peak memory of this process, with the keys of ``peak_memory``."""
        return peak_memory()

    def matmul_rate(self) -> float:
        """Measure floating-point operations per second of a large matrix product on this device, in the passes' dtype."""
        dtype = compute_dtype(self.config.compute_dtype, self.device.type) or self.policy_module.lm.dtype
        return matmul_rate(self.device, dtype)

    def export_weights(
        self, version: int, dtype: str | None = None, engines: Engines = (), for_later_engines: bool = False
    ) -> Weights | None:
        """Prepare the policy's weights for the engines, without passing them through the driver. All learners must call this.

        Args:
            version: version number of these weights.
            dtype: dtype to which the weights are converted; ``None`` keeps the learner's.
            engines: engines that will load the weights.
            for_later_engines: whether to use Ray's object store with any backend, so that engines can load the weights later.

        Returns:
            The weights for the engines, or ``None`` if the engines need nothing from this learner.
        """
        sender = ObjectStoreSender(self.exchange.rank) if for_later_engines else self.sender
        weights = partial(self.policy_module.named_weights, getattr(torch, dtype) if dtype else None)
        module, ids = self.policy_module, text_ids(self.policy_module.tokenizer)
        limit = TEXT_FACTOR * self.config.logprob_diff_limit()
        text = TextLogprobs(ids, module.text_logprobs(ids), limit, type(module.lm).__name__)
        prepared = sender.prepare(weights, version, engines)
        return None if prepared is None else replace(prepared, text=text)

    def free_memory(self) -> None:
        """Free the device memory that only updates need, for the engine on the same device."""
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return RLlib's state, with whole weights and optimizer state as arrays, the method's state and ``SAVED_ATTRIBUTES``.

        Sharded tensors are gathered, so every learner must call this (``PolicyLearnerGroup.get_state`` does).

        Args:
            components: as in RLlib.
            not_components: as in RLlib.
            kwargs: as in RLlib. With ``inference_only``, the state has neither weights nor optimizer state, which checkpoints
                store in separate files.
        """
        excluded = [not_components] if isinstance(not_components, str) else list(not_components or ())
        state: dict[str, Any] = super().get_state(components, not_components=[*excluded, COMPONENT_OPTIMIZER], **kwargs)
        state |= {"method": dict(self.method.state), **{name: getattr(self, name) for name in SAVED_ATTRIBUTES}}
        if not kwargs.get("inference_only") and self._check_component(COMPONENT_OPTIMIZER, components, excluded):
            state[COMPONENT_OPTIMIZER] = to_arrays(self._optimizer_tensors())
        return state

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return state_tensors(self._named_optimizers, self.policy_module.parameter_names())

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write RLlib's files and, unless they are sharded (see :meth:`save_shards`), weights and optimizer state."""
        folder: str = super().save_to_path(path, state=state or self.get_state(inference_only=True), **kwargs)
        sharded = self.policy_module.sharded is not None
        save_optimizers(self._named_optimizers, self.iteration, Path(folder), sharded=sharded)
        return folder

    def save_shards(self, folder: Path) -> None:
        """Add sharded weights and optimizer state to the first learner's files; every learner must call this.

        Args:
            folder: the folder that was given to :meth:`save_to_path`.

        Raises:
            CheckpointError: not every learner can access the folder.
        """
        if num_missing := self.exchange.gather(folder.is_dir()).count(False):
            raise CheckpointError(
                f"{num_missing} of {self.exchange.num_learners} learners cannot access {folder}: a sharded model is saved by all "
                "learners together. Set the run folder to a file system that all of them share."
            )
        save_shards(self._named_optimizers, self.policy_module.parameter_names(), folder)
        module_folder = folder / COMPONENT_RL_MODULE / DEFAULT_MODULE_ID
        self.policy_module.save_weights(module_folder, write=self.exchange.rank == 0)

    def restore_from_path(self, path: str | Path, **kwargs: Any) -> None:
        """Load the files of :meth:`save_to_path` and :meth:`save_shards`, but keep the optimizer settings of the config.

        Raises:
            CheckpointError: files are missing, or were written with another ``sharding``.
        """
        super().restore_from_path(path, **kwargs)
        if kwargs.get("component"):  # RLlib has restored a single component; the optimizers stay as they are.
            return
        names = None if self.policy_module.sharded is None else self.policy_module.parameter_names()
        self.iteration = load_optimizers(self._named_optimizers, names, Path(path))
        self.apply_optimizer_settings(self.env_steps)

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`get_state`, but keep the optimizer settings of the config.

        Raises:
            CheckpointError: the state is of another model; nothing was changed.
        """
        # Load the weights here: RLlib skips weights with a lower sequence number than the current ones.
        others = dict(state)
        weights, moments = others.pop(COMPONENT_RL_MODULE, None), others.pop(COMPONENT_OPTIMIZER, None)
        if moments is not None:
            require_fitting(moments, self._optimizer_tensors())
        if weights is not None:
            self.module.set_state(weights)
        if moments is not None:
            from_arrays(moments, self._optimizer_tensors())
        super().set_state(others)
        for name in SAVED_ATTRIBUTES & state.keys():
            setattr(self, name, state[name])
        self.method.state = dict(state.get("method", self.method.state))
        if "env_steps" in state:
            self.apply_optimizer_settings(state["env_steps"])
