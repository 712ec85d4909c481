"""The learner of every method: connectors, microbatches, the outcome loss, checkpoints, weight export."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core import COMPONENT_OPTIMIZER, DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.rl_module import RLModule
from torch import nn

from trial_ray.errors import CheckpointError, TrainingDivergedError
from trial_ray.inference.weights import WeightShards, pack_weights
from trial_ray.learner.connectors.collate_rows import CollateRows
from trial_ray.learner.connectors.group_advantages import GroupAdvantages
from trial_ray.learner.connectors.prepare_rows import PrepareRows
from trial_ray.learner.connectors.privileged_views import PrivilegedViews
from trial_ray.learner.connectors.score_rows import ScoreRows
from trial_ray.learner.method import Method
from trial_ray.learner.packing import OrdinaryBatch, Row, make_buckets
from trial_ray.learner.turn_rows import Columns, TokenBatch, rows_of, split_columns
from trial_ray.models.causal_lm_module import CausalLMModule
from trial_ray.objectives.divergences import k3_divergence
from trial_ray.objectives.losses import clipped_surrogate

OPTIMIZER_FILE = "optimizer.pt"
INPUTS = ("input_ids", "position_ids", "rows", "positions", "targets")
MAX_PADDING = 0.15
"""A forward pass is cut into sub-batches so that hardly any row is padded by more than this share of its length."""


class GRPOLearner(TorchLearner):
    """Clipped surrogate over turn rows with group-relative advantages, and what the config's method adds to it.

    An update scores all rows once, then takes one optimizer step per minibatch. A minibatch is cut into microbatches of
    ``microbatch_rows`` turn rows in task order; each contributes its token mean, and the mean over microbatches is what is
    differentiated. What does not fit into one forward pass is cut further for memory's sake alone.
    """

    def build(self) -> None:
        """Build the module, the optimizer and the connector pieces."""
        super().build()
        self.method: Method = self.config.method_class(self.config)
        self.iteration = 0
        self.skipped_in_a_row = 0
        for piece in self.connector_pieces():
            self._learner_connector.append(piece)

    def connector_pieces(self) -> list[Any]:
        """Pieces from trajectory groups to the train batch, in order."""
        views = [PrivilegedViews(self.config)] if self.config.privileged_view is not None else []
        return [
            GroupAdvantages(self.config),
            *views,
            ScoreRows(self.config),
            PrepareRows(self.method, lambda: self.iteration),
            CollateRows(self.device),
        ]

    @property
    def policy_module(self) -> CausalLMModule:
        """The trained module, whether or not it is wrapped for data parallelism."""
        return self.module[DEFAULT_MODULE_ID].unwrapped()

    def get_parameters(self, module: RLModule) -> list[nn.Parameter]:
        """Parameters that the optimizer updates."""
        return module.unwrapped().policy_parameters()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """AdamW, as in the published runs."""
        parameters = self.get_parameters(self.module[module_id])
        # The rate is set on registration, and again after each update where lr is a schedule over environment steps.
        optimizer = torch.optim.AdamW(parameters, betas=tuple(config.adam_betas), weight_decay=config.weight_decay)
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=config.lr
        )

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Note the iteration that schedules refer to (counted from 1); renew the lagged teacher when it is due."""
        super().before_gradient_based_update(timesteps=timesteps)
        self.iteration = timesteps.get("training_iteration", self.iteration + 1)
        if (period := self.config.teacher_sync_iterations) and (self.iteration - 1) % period == 0:
            self.policy_module.renew_teacher()

    # -- the loss --------------------------------------------------------------------------------------------------

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Columns, fwd_out: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Loss of one microbatch: the outcome loss with the method's advantages, and the method's dense term."""
        tokens = TokenBatch.from_columns(batch)
        advantages = self.method.token_advantages(tokens, fwd_out["logprobs"].detach(), self.iteration)
        outcome, surrogate = self.outcome_loss(replace(tokens, advantages=advantages), fwd_out)
        loss, logged = self.method.add_dense(outcome, surrogate, tokens, fwd_out, self.iteration)
        self.log_means(self.method.name, logged)
        return loss

    def outcome_loss(self, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """L_out = L_GRPO + kl_coeff · KL − entropy_coeff · entropy, each a token mean over the microbatch.

        Returns:
            ``(outcome_loss, surrogate_loss)``, scalars; the second is L_GRPO alone, to which the clamp of Eq. 8 refers.
        """
        config, logprobs = self.config, fwd_out["logprobs"]
        surrogate = clipped_surrogate(
            logprobs,
            tokens.old_logprobs,
            tokens.advantages,
            tokens.mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        entropy = fwd_out["entropy"].mean()
        outcome = surrogate - config.entropy_coeff * entropy
        ratio = (logprobs.detach() - tokens.old_logprobs).exp()
        clipped = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
        logged = {"surrogate_loss": surrogate, "entropy": entropy, "clip_fraction": clipped.float().mean()}
        if tokens.reference_logprobs is not None:
            kl = k3_divergence(logprobs, tokens.reference_logprobs, tokens.mask)
            outcome = outcome + config.kl_coeff * kl
            logged["kl"] = kl
        else:
            # Without a reference, the drift from the sampling policy is what there is to watch.
            logged["kl"] = k3_divergence(logprobs.detach(), tokens.old_logprobs, tokens.mask)
        self.log_means("grpo", logged)
        return outcome, surrogate

    def log_means(self, prefix: str, values: dict[str, torch.Tensor]) -> None:
        """Log scalars under ``prefix``, averaged over the microbatches of the iteration."""
        for name, value in values.items():
            self.metrics.log_value((DEFAULT_MODULE_ID, prefix, name), value.detach().item(), reduce="mean")

    # -- the update ------------------------------------------------------------------------------------------------

    def _uncompiled_update(self, batch: dict[str, Columns], **kwargs: Any) -> tuple[Any, Any, Any]:
        """One optimizer step on one minibatch."""
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        microbatches = list(split_columns(batch[DEFAULT_MODULE_ID], self.config.microbatch_rows))
        losses = [
            self._backward(microbatch, scale=1 / len(microbatches), last=index == len(microbatches) - 1)
            for index, microbatch in enumerate(microbatches)
        ]
        gradients = {ref: parameter.grad for ref, parameter in self._params.items() if parameter.grad is not None}
        if self._finite(gradients):
            self.apply_gradients(self.postprocess_gradients(gradients))
        return {}, {DEFAULT_MODULE_ID: torch.stack(losses).mean()}, {}

    def _backward(self, microbatch: Columns, scale: float, last: bool) -> torch.Tensor:
        """Add the gradient of ``scale`` times the microbatch's loss; return the loss.

        Where the rows need several forward passes, the loss is first differentiated with respect to the log-probabilities
        of the whole microbatch, and that gradient is then carried through one pass after the other: means and clamp see
        the whole microbatch, so the gradient is the same as without the split.
        """
        rows = rows_of(microbatch)
        buckets = make_buckets(_lengths(rows), self.config.max_tokens_per_forward)
        if len(buckets) == 1:
            with self._gradient_sync(last):
                loss = self._loss(microbatch, self._forward_rows(rows))
                (scale * loss).backward()
            return loss.detach()
        lengths = microbatch["response_length"].cpu()
        places = [_token_places(lengths, bucket).to(self.device) for bucket in buckets]
        whole = self._whole_outputs(rows, buckets, places)
        loss = self._loss(microbatch, whole)
        (scale * loss).backward()
        for index, (bucket, place) in enumerate(zip(buckets, places, strict=True)):
            with self._gradient_sync(last and index == len(buckets) - 1):
                outputs = self._forward_rows([rows[row] for row in bucket])
                names = [name for name in outputs if whole[name].grad is not None]
                torch.autograd.backward([outputs[name] for name in names], [whole[name].grad[place] for name in names])
        return loss.detach()

    def _whole_outputs(
        self, rows: list[Row], buckets: list[Any], places: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Outputs of all rows without their graphs, as leaves that collect the loss's gradient."""
        whole: dict[str, torch.Tensor] = {}
        num_tokens = sum(len(row.response_ids) for row in rows)
        with torch.no_grad():
            for bucket, place in zip(buckets, places, strict=True):
                for name, value in self._forward_rows([rows[row] for row in bucket]).items():
                    whole.setdefault(name, torch.zeros(num_tokens, dtype=value.dtype, device=value.device))[place] = (
                        value
                    )
        return {name: value.requires_grad_() for name, value in whole.items()}

    def _forward_rows(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """One forward pass of the module over rows that fit into memory together; outputs ``[T]`` in row order."""
        groups = make_buckets(_lengths(rows), self.config.max_tokens_per_forward, MAX_PADDING)
        packed = [OrdinaryBatch.from_rows([rows[row] for row in group], self.device) for group in groups]
        batch: dict[str, Any] = {"batches": [{name: getattr(part, name) for name in INPUTS} for part in packed]}
        if self.method.needs_divergence:
            hindsight = [
                OrdinaryBatch.from_rows([rows[row].hindsight_row for row in group], self.device) for group in groups
            ]
            batch["hindsight_batches"] = [{name: getattr(part, name) for name in INPUTS} for part in hindsight]
            batch["divergence"] = {"mix": self.config.jsd_mix, "temperature": self.config.jsd_temperature}
        outputs = self.module[DEFAULT_MODULE_ID].forward_train(batch)
        lengths = torch.tensor([len(row.response_ids) for row in rows])
        places = torch.cat([_token_places(lengths, group) for group in groups]).to(self.device)
        return {name: torch.empty_like(value).index_copy(0, places, value) for name, value in outputs.items()}

    def _loss(self, microbatch: Columns, fwd_out: dict[str, torch.Tensor]) -> torch.Tensor:
        if not torch.isfinite(fwd_out["logprobs"]).all():
            # Goes through the backward pass like any loss, so that every learner sees it in its gradients and skips.
            return fwd_out["logprobs"].sum() * torch.nan
        return self.compute_losses(fwd_out={DEFAULT_MODULE_ID: fwd_out}, batch={DEFAULT_MODULE_ID: microbatch})[
            DEFAULT_MODULE_ID
        ]

    def _gradient_sync(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        """Let data-parallel learners exchange gradients only in the last backward pass of a minibatch."""
        module = self.module[DEFAULT_MODULE_ID]
        return module.no_sync() if self.config.num_learners > 1 and not enabled else contextlib.nullcontext()

    def _finite(self, gradients: dict[Any, torch.Tensor]) -> bool:
        """Whether all gradients are finite; counts and limits the updates that are skipped because they are not.

        Gradients were exchanged before, so data-parallel learners decide alike.
        """
        finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        self.metrics.log_value((DEFAULT_MODULE_ID, "skipped_updates"), int(not finite), reduce="sum")
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise TrainingDivergedError(
                f"Gradients were not finite in {self.skipped_in_a_row} updates in a row. Lower lr, or check the rewards; "
                "the weights are still those before the first of them."
            )
        return finite

    # -- weights and checkpoints -----------------------------------------------------------------------------------

    def export_weights(self, version: int, dtype: str | None = None) -> WeightShards:
        """Put the policy's weights into the object store, from where engines read them; the driver never holds them.

        Args:
            version: stamp of these weights.
            dtype: dtype that the engines hold; ``None`` leaves the learner's.
        """
        wanted = getattr(torch, dtype) if dtype else None
        weights = ((name, tensor.to(wanted)) for name, tensor in self.policy_module.named_weights())
        return pack_weights(weights, version)

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Leave the optimizer out: it is written to a file of its own by :meth:`save_to_path`."""
        left_out = [not_components] if isinstance(not_components, str) else list(not_components or ())
        state = super().get_state(components, not_components=[*left_out, COMPONENT_OPTIMIZER], **kwargs)
        return state

    def save_to_path(self, path: str | Path | None = None, **kwargs: Any) -> str:
        """Write RLlib's files and the optimizer's state."""
        path = super().save_to_path(path, **kwargs)
        states = {name: optimizer.state_dict() for name, optimizer in self._named_optimizers.items()}
        torch.save({"optimizers": states, "iteration": self.iteration}, Path(path) / OPTIMIZER_FILE)
        return path

    def restore_from_path(self, path: str | Path, **kwargs: Any) -> None:
        """Load what :meth:`save_to_path` wrote.

        Raises:
            CheckpointError: the optimizer's file is missing.
        """
        super().restore_from_path(path, **kwargs)
        file = Path(path) / OPTIMIZER_FILE
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the checkpoint is incomplete. Resume from another one.")
        saved = torch.load(file, map_location=self.device, weights_only=True)
        for name, state in saved["optimizers"].items():
            self._named_optimizers[name].load_state_dict(state)
        self.iteration = saved["iteration"]


def _lengths(rows: list[Row]) -> list[int]:
    """Input tokens of each row's longest view; rows hold evidence only where the training forward scores it."""
    return [row.length + len(row.evidence_ids) for row in rows]


def _token_places(lengths: torch.Tensor, rows: Any) -> torch.Tensor:
    """Places of the tokens of ``rows`` among the flat tokens of all rows, int64."""
    starts = torch.cumsum(lengths, 0) - lengths
    return torch.cat([torch.arange(int(starts[row]), int(starts[row] + lengths[row])) for row in rows])
