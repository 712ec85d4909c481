"""Forward and backward passes over the microbatches of an optimizer step, packed together and cut as memory asks for.

As many microbatches as fit share a forward pass, so that what their rows have in common is computed once; each keeps its own
loss. A microbatch that does not fit is cut, and a cut never changes the gradient. A loss that is a mean over tokens is the sum
of its parts' means, each weighed by its share of the tokens. What is more than that (the scalar clamp of Eq. 8, a surrogate over
whole sequences) is first computed on all rows of the microbatch without a graph, differentiated with respect to the
log-probabilities, and that gradient is carried through one part after the other.

A pass whose loss has no gradient with respect to the model's outputs is not carried through the model, where it would add
zeros: rollouts of a group that all earned the same, where nothing but their advantages trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trial_ray.learner.loss import LossTerms, MinibatchClamp, WeightedMeans, loss_terms, microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.packing import lay_out, pass_parts
from trial_ray.learner.rows import TokenBatch, TurnRows
from trial_ray.learner.update_plan import Microbatch
from trial_ray.models.module import CausalLMModule
from trial_ray.models.prefix_tree import PrefixOrder

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

Outputs = dict[str, torch.Tensor]
"""Results of the module's forward pass, each ``[T]`` in row order."""


@dataclass(slots=True)
class TokenCounts:
    """Model inputs, padding included, and the distinct prefixes of the rows that they were computed for."""

    forwarded: int = 0
    distinct: int = 0


class MicrobatchPasses:
    """Computes losses of microbatches and adds up their gradients.

    Args:
        module: the policy.
        method: what is trained with.
        config: clips, coefficients and limits.
        means: takes the logged scalars.
        before_last: called before the last backward pass of each call of :meth:`backward` that makes any.

    Attributes:
        counts: inputs of the forward passes since they were last taken.
        broken: whether the policy gave log-probabilities that are not finite since this was last set to ``False``.
    """

    def __init__(
        self,
        module: CausalLMModule,
        method: Method[Any],
        config: RunSettings,
        means: WeightedMeans,
        before_last: Callable[[], None] = lambda: None,
    ) -> None:
        self._module = module
        self._method = method
        self._config = config
        self._means = means
        self._before_last = before_last
        self._backward_passes_left = 0
        self.counts = TokenCounts()
        self.broken = False
        self._iteration = 0
        self._clamp: MinibatchClamp | None = None

    def backward(
        self,
        table: TurnRows,
        microbatches: Sequence[Microbatch],
        iteration: int,
        clamp: MinibatchClamp | None = None,
    ) -> float:
        """Add the gradients of the microbatches' losses, each times its weight; returns the sum of these products.

        Args:
            table: all rows of the update.
            microbatches: those of an optimizer step that this learner computes.
            iteration: counted from 1.
            clamp: as in :func:`trial_ray.learner.loss.microbatch_loss`.
        """
        self._table, self._iteration, self._clamp = table, iteration, clamp
        as_whole = self._method.clamps("microbatch", iteration) or not self._method.has_token_mean()
        work = [(group, self._parts(group[0].rows) if len(group) == 1 else []) for group in self._groups(microbatches)]
        self._backward_passes_left = sum(max(1, len(parts)) for _, parts in work)
        total = 0.0
        for group, parts in work:
            if len(parts) < 2:
                total += self._backward_together(group)
            else:
                total += (self._backward_whole if as_whole else self._backward_parts)(group[0], parts)
        return total

    @torch.no_grad()
    def clamp_scalars(self, table: TurnRows, microbatches: Sequence[Microbatch], iteration: int) -> torch.Tensor:
        """L_GRPO and L_dense of the microbatches, each times its weight, added up; float64 ``[2]``, without a gradient.

        NaN where log-probabilities are not finite: the backward passes skip the step, and other learners wait for this sum.
        """
        self._table, self._iteration = table, iteration
        scalars = torch.zeros(2, dtype=torch.float64)
        for group in self._groups(microbatches):
            rows = np.concatenate([each.rows for each in group])
            outputs = self._whole_outputs(rows, self._parts(rows))
            for each, own in zip(group, _split(outputs, self._table, group), strict=True):
                finite = self._finite(own)
                scalars += each.weight * _scalars(self._terms(each.rows, own)) if finite else torch.nan
        return scalars

    def _backward_together(self, group: Sequence[Microbatch]) -> float:
        outputs = self._forward(np.concatenate([each.rows for each in group]))
        losses = [
            each.weight * self._loss(each.rows, own, each.weight)
            for each, own in zip(group, _split(outputs, self._table, group), strict=True)
        ]
        return self._backward_loss(torch.stack(losses).sum(), outputs)

    def _backward_parts(self, microbatch: Microbatch, parts: Sequence[np.ndarray]) -> float:
        counts = [int(self._table.mask[self._table.token_positions(part)].sum()) for part in parts]
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            weight = microbatch.weight * count / max(1, sum(counts))
            outputs = self._forward(part)
            total += self._backward_loss(weight * self._loss(part, outputs, weight), outputs)
        return total

    def _backward_whole(self, microbatch: Microbatch, parts: Sequence[np.ndarray]) -> float:
        rows = microbatch.rows
        whole = {name: value.requires_grad_() for name, value in self._whole_outputs(rows, parts).items()}
        loss = microbatch.weight * self._loss(rows, whole, microbatch.weight)
        gradients = _gradients(loss, whole)
        for position, part in self._token_positions(rows, parts):
            own = {name: gradient[position] for name, gradient in gradients.items()}
            self._backward_pass(partial(self._forward, part), own)
        return loss.item()

    def _backward_loss(self, loss: torch.Tensor, outputs: Outputs) -> float:
        self._backward_pass(lambda: outputs, _gradients(loss, outputs))
        return loss.item()

    def _backward_pass(self, outputs: Callable[[], Outputs], gradients: Outputs) -> None:
        """A backward pass through the model, from the gradients of its outputs.

        One that would add zeros is left out, but not the last, from which parameters have gradients and sums over learners
        begin, nor any of a sharded model, whose learners make as many.
        """
        self._backward_passes_left -= 1
        carried = {name: gradient for name, gradient in gradients.items() if bool(gradient.any())}
        if not self._backward_passes_left:
            self._before_last()
        elif not carried and self._module.sharded is None:
            return
        found, carried = outputs(), carried or gradients
        torch.autograd.backward([found[name] for name in carried], [*carried.values()])

    @torch.no_grad()
    def _whole_outputs(self, rows: np.ndarray, parts: Sequence[np.ndarray]) -> Outputs:
        """Outputs of all rows, without their graphs."""
        whole: Outputs = {}
        num_tokens = int(self._table.lengths[torch.from_numpy(rows)].sum())
        for position, part in self._token_positions(rows, parts):
            for name, value in self._forward(part).items():
                whole.setdefault(name, value.new_zeros(num_tokens))[position] = value
        return whole

    def _loss(self, rows: np.ndarray, outputs: Outputs, weight: float) -> torch.Tensor:
        if not self._finite(outputs):
            # Goes through the backward pass like any loss, so that every learner sees it in its gradients and skips.
            return outputs["logprobs"].sum() * torch.nan
        terms = self._terms(rows, outputs)
        loss = microbatch_loss(self._method, terms, self._iteration, self._clamp)
        with self._means.weighing(weight):
            for prefix, values in terms.logged.items():
                self._means.add(prefix, values)
        return loss

    def _finite(self, outputs: Outputs) -> bool:
        finite = bool(torch.isfinite(outputs["logprobs"]).all())
        self.broken = self.broken or not finite
        return finite

    def _terms(self, rows: np.ndarray, outputs: Outputs) -> LossTerms:
        tokens = TokenBatch.from_rows(self._table, rows, outputs["logprobs"].device)
        return loss_terms(self._method, self._config, tokens, outputs, self._iteration)

    # -- what is computed together -----------------------------------------------------------------------------------

    def _groups(self, microbatches: Sequence[Microbatch]) -> Iterator[Sequence[Microbatch]]:
        """Consecutive microbatches whose rows fit into one forward pass; one that does not fit stands alone."""
        if not microbatches:
            return
        rows = np.concatenate([each.rows for each in microbatches])
        if len(microbatches) == 1 or len(self._parts(rows)) == 1:
            yield microbatches
            return
        middle = len(microbatches) // 2
        yield from self._groups(microbatches[:middle])
        yield from self._groups(microbatches[middle:])

    def _parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Row numbers by forward pass; a microbatch in one piece keeps its order."""
        parts = pass_parts(self._module.lm, self._order(rows), self._config.max_tokens_per_forward)
        return [rows[part] for part in parts] if len(parts) > 1 else [rows]

    def _order(self, rows: np.ndarray) -> PrefixOrder:
        """Order by each row's longest view; rows hold evidence only where the training forward scores it."""
        views = self._table.model_rows(rows, with_evidence=self._method.divergence is not None)
        return PrefixOrder([row.hindsight_row.sequence if len(row.evidence_ids) else row.sequence for row in views])

    def _token_positions(
        self, rows: np.ndarray, parts: Sequence[np.ndarray]
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Where the tokens of each part stand among those of ``rows``."""
        tokens = self._table.token_positions(rows)
        place = torch.zeros(len(self._table.turn_ids), dtype=torch.int64)
        place[tokens] = torch.arange(len(tokens))
        for part in parts:
            yield place[self._table.token_positions(part)].to(self._module.lm.device), part

    def _forward(self, rows: np.ndarray) -> Outputs:
        """One forward pass over rows that fit into memory together; outputs ``[T]`` in the order of ``rows``."""
        config, divergence = self._config, self._method.divergence
        model_rows = self._table.model_rows(rows, with_evidence=divergence is not None)
        order = PrefixOrder([row.sequence for row in model_rows])
        packed = lay_out(self._module.lm, order, config.max_tokens_per_forward)
        self.counts.forwarded += packed.num_tokens
        self.counts.distinct += packed.num_distinct
        batch: dict[str, Any] = {"sequences": packed, "temperature": config.temperature}
        if divergence is not None:
            teacher = self._module.teacher or self._module.lm
            order = PrefixOrder([row.hindsight_row.sequence for row in model_rows])
            batch["hindsight_sequences"] = lay_out(teacher, order, config.max_tokens_per_forward)
            # The policy is the tempered one; the method's temperature divides its logits once more.
            temperature = config.temperature * divergence.temperature
            batch["divergence"] = {"mix": divergence.mix, "temperature": temperature}
        outputs: Outputs = self._module.forward_train(batch)
        return outputs


def _gradients(loss: torch.Tensor, outputs: Outputs) -> Outputs:
    """Of the loss with respect to those outputs that it depends on; NaN of a loss that is NaN."""
    leaves = {name: value for name, value in outputs.items() if value.requires_grad}
    found = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


def _split(outputs: Outputs, table: TurnRows, group: Sequence[Microbatch]) -> Iterator[Outputs]:
    """The outputs of each microbatch, of those of all laid end to end."""
    sizes = [int(table.lengths[torch.from_numpy(each.rows)].sum()) for each in group]
    pieces = {name: value.split(sizes) for name, value in outputs.items()}
    for index in range(len(group)):
        yield {name: each[index] for name, each in pieces.items()}


def _scalars(terms: LossTerms) -> torch.Tensor:
    """L_GRPO and L_dense, float64 ``[2]`` on the CPU; no dense term is one of 0."""
    dense = torch.zeros_like(terms.surrogate) if terms.dense is None else terms.dense
    return torch.stack([terms.surrogate, dense]).double().cpu()
