"""Forward and backward passes over the rows of a microbatch, cut into as many as memory asks for.

A cut never changes the gradient. A loss that is a mean over tokens is the sum of its parts' means, each weighed by its
share of the tokens. What is more than that (the scalar clamp of Eq. 8, a surrogate over whole sequences) is first computed
on all rows of the microbatch without a graph, differentiated with respect to the log-probabilities, and that gradient is
carried through one pass after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trial_ray.learner.loss import LossTerms, MinibatchClamp, loss_terms, microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.packing import OrdinaryBatch, Row, make_buckets
from trial_ray.learner.turn_rows import TokenBatch, TurnRows
from trial_ray.learner.weighted_means import WeightedMeans
from trial_ray.models.causal_lm_module import CausalLMModule

if TYPE_CHECKING:
    from trial_ray.learner.settings import LearnerSettings

INPUTS = ("input_ids", "position_ids", "rows", "positions", "targets")
MAX_PADDING = 0.15
"""A forward pass is cut into sub-batches so that hardly any row is padded by more than this share of its length."""

Outputs = dict[str, torch.Tensor]
"""What the module's forward pass returns, each ``[T]`` in row order."""


class MicrobatchPasses:
    """Computes losses of microbatches and adds up their gradients.

    Args:
        module: the policy.
        method: what is trained with.
        config: clips, coefficients and limits.
        means: takes the logged scalars.
    """

    def __init__(
        self, module: CausalLMModule, method: Method[Any], config: LearnerSettings, means: WeightedMeans
    ) -> None:
        self._module = module
        self._method = method
        self._config = config
        self._means = means

    def backward(
        self,
        table: TurnRows,
        rows: np.ndarray,
        weight: float,
        iteration: int,
        clamp: MinibatchClamp | None = None,
    ) -> float:
        """Add the gradient of ``weight`` times the loss of the microbatch ``rows``; returns the loss, unweighted.

        Args:
            table: all rows of the update.
            rows: numbers of the microbatch's rows.
            weight: share of the microbatch in its minibatch.
            iteration: counted from 1.
            clamp: as in :func:`trial_ray.learner.loss.microbatch_loss`.
        """
        buckets = self._buckets(table, rows)
        clamped_here = self._method.clamps(iteration) and self._method.clamp_scope == "microbatch"
        if len(buckets) > 1 and (clamped_here or not self._method.has_token_mean()):
            return self._backward_whole(table, rows, buckets, weight, iteration, clamp)
        total = 0.0
        for bucket, share in self._shares(table, rows, buckets):
            outputs = self._forward(table, bucket)
            loss = self._loss(table, bucket, outputs, iteration, weight * share, clamp)
            (weight * share * loss).backward()
            total += share * loss.item()
        return total

    @torch.no_grad()
    def clamp_scalars(self, table: TurnRows, rows: np.ndarray, iteration: int) -> torch.Tensor:
        """L_GRPO and L_dense of a microbatch, float64 ``[2]``, without a gradient."""
        buckets = self._buckets(table, rows)
        if len(buckets) > 1 and not self._method.has_token_mean():
            terms = self._terms(table, rows, self._whole_outputs(table, rows, buckets), iteration)
            return _scalars(terms)
        scalars = torch.zeros(2, dtype=torch.float64)
        for bucket, share in self._shares(table, rows, buckets):
            terms = self._terms(table, bucket, self._forward(table, bucket), iteration)
            scalars += share * _scalars(terms)
        return scalars

    def _backward_whole(
        self,
        table: TurnRows,
        rows: np.ndarray,
        buckets: list[np.ndarray],
        weight: float,
        iteration: int,
        clamp: MinibatchClamp | None,
    ) -> float:
        whole = {name: value.requires_grad_() for name, value in self._whole_outputs(table, rows, buckets).items()}
        loss = self._loss(table, rows, whole, iteration, weight, clamp)
        (weight * loss).backward()
        gradients = {name: value.grad for name, value in whole.items() if value.grad is not None}
        for position, bucket in self._token_positions(table, rows, buckets):
            outputs = self._forward(table, bucket)
            names = [name for name in outputs if name in gradients]
            torch.autograd.backward([outputs[name] for name in names], [gradients[name][position] for name in names])
        return loss.item()

    @torch.no_grad()
    def _whole_outputs(self, table: TurnRows, rows: np.ndarray, buckets: list[np.ndarray]) -> Outputs:
        """Outputs of all rows, without their graphs."""
        whole: Outputs = {}
        num_tokens = int(table.lengths[torch.from_numpy(rows)].sum())
        for position, bucket in self._token_positions(table, rows, buckets):
            for name, value in self._forward(table, bucket).items():
                whole.setdefault(name, value.new_zeros(num_tokens))[position] = value
        return whole

    def _loss(
        self,
        table: TurnRows,
        rows: np.ndarray,
        outputs: Outputs,
        iteration: int,
        weight: float,
        clamp: MinibatchClamp | None,
    ) -> torch.Tensor:
        if not torch.isfinite(outputs["logprobs"]).all():
            # Goes through the backward pass like any loss, so that every learner sees it in its gradients and skips.
            return outputs["logprobs"].sum() * torch.nan
        terms = self._terms(table, rows, outputs, iteration)
        loss = microbatch_loss(self._method, terms, iteration, clamp)
        with self._means.weighing(weight):
            for prefix, values in terms.logged.items():
                self._means.add(prefix, values)
        return loss

    def _terms(self, table: TurnRows, rows: np.ndarray, outputs: Outputs, iteration: int) -> LossTerms:
        tokens = TokenBatch.from_rows(table, rows, outputs["logprobs"].device)
        return loss_terms(self._method, self._config, tokens, outputs, iteration)

    # -- forward passes ----------------------------------------------------------------------------------------------

    def _model_rows(self, table: TurnRows, rows: np.ndarray) -> list[Row]:
        return table.model_rows(rows, with_evidence=self._method.needs_divergence)

    def _buckets(self, table: TurnRows, rows: np.ndarray) -> list[np.ndarray]:
        """Row numbers by forward pass."""
        lengths = _lengths(self._model_rows(table, rows))
        return [rows[bucket] for bucket in make_buckets(lengths, self._config.max_tokens_per_forward)]

    def _shares(
        self, table: TurnRows, rows: np.ndarray, buckets: list[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, float]]:
        """Parts of a microbatch with their share of the tokens to learn from; a microbatch in one piece keeps its order."""
        if len(buckets) == 1:
            yield rows, 1.0
            return
        counts = [int(table.mask[table.token_positions(bucket)].sum()) for bucket in buckets]
        for bucket, count in zip(buckets, counts, strict=True):
            yield bucket, count / max(1, sum(counts))

    def _token_positions(
        self, table: TurnRows, rows: np.ndarray, buckets: list[np.ndarray]
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Where the tokens of each part stand among those of ``rows``."""
        lengths = table.lengths.numpy()[rows]
        starts = dict(zip(rows.tolist(), (np.cumsum(lengths) - lengths).tolist(), strict=True))
        for bucket in buckets:
            positions = [np.arange(starts[row], starts[row] + int(table.lengths[row])) for row in bucket.tolist()]
            yield torch.from_numpy(np.concatenate(positions)).to(self._module.lm.device), bucket

    def _forward(self, table: TurnRows, rows: np.ndarray) -> Outputs:
        """One forward pass over rows that fit into memory together; outputs ``[T]`` in the order of ``rows``."""
        model_rows, device = self._model_rows(table, rows), self._module.lm.device
        groups = make_buckets(_lengths(model_rows), self._config.max_tokens_per_forward, MAX_PADDING)
        batch: dict[str, Any] = {
            "batches": [_inputs([model_rows[row] for row in group], device) for group in groups],
            "temperature": self._config.temperature,
        }
        if self._method.needs_divergence:
            batch["hindsight_batches"] = [
                _inputs([model_rows[row].hindsight_row for row in group], device) for group in groups
            ]
            # The policy is the tempered one; the method's temperature divides its logits once more.
            own = self._method.config
            temperature = self._config.temperature * own.jsd_temperature
            batch["divergence"] = {"mix": own.jsd_mix, "temperature": temperature}
        outputs = self._module.forward_train(batch)
        ordered = np.concatenate([rows[group] for group in groups])
        positions = torch.cat([position for position, _ in self._token_positions(table, rows, [ordered])])
        return {name: torch.empty_like(value).index_copy(0, positions, value) for name, value in outputs.items()}


def _scalars(terms: LossTerms) -> torch.Tensor:
    """L_GRPO and L_dense, float64 ``[2]`` on the CPU; no dense term is one of 0."""
    dense = torch.zeros_like(terms.surrogate) if terms.dense is None else terms.dense
    return torch.stack([terms.surrogate, dense]).double().cpu()


def _inputs(rows: list[Row], device: torch.device) -> dict[str, torch.Tensor]:
    batch = OrdinaryBatch.from_rows(rows, device)
    return {name: getattr(batch, name) for name in INPUTS}


def _lengths(rows: list[Row]) -> list[int]:
    """Input tokens of each row's longest view; rows hold evidence only where the training forward scores it."""
    return [row.length + len(row.evidence_ids) for row in rows]
