"""Forward and backward passes over the microbatches of an optimizer step, combined and split to fit into memory.

Microbatches that fit share a forward pass, so common prefixes of their rows are computed once; each keeps its own loss. A
microbatch that does not fit is split, which never changes the gradient. A loss that is a mean over tokens is the sum of its
parts' means, each weighted by its share of the tokens. Any other loss (the scalar clamp of Eq. 8, a surrogate over whole
sequences) is first computed on all rows of the microbatch without a graph and differentiated with respect to the
log-probabilities; that gradient is then propagated through one part after the other.

If the loss of a pass has no gradient with respect to the model's outputs, there is no backward pass through the model, since it
would add zeros: for example, rollouts of a group with equal rewards, if only their advantages train them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trial_ray.learner.loss import WeightedMeans, microbatch_loss
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
    """Number of model inputs, including padding, and of distinct prefixes of the rows that they were computed for."""

    forwarded: int = 0
    distinct: int = 0


class MicrobatchPasses:
    """Computes losses of microbatches and adds up their gradients.

    Args:
        module: the policy.
        method: method that is trained.
        config: clips, coefficients and limits.
        means: accumulates the logged scalars.
        before_last: called before the last backward pass of each call of :meth:`backward`, if there is one.

    Attributes:
        counts: inputs of the forward passes since the last reset.
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

    def backward(self, table: TurnRows, microbatches: Sequence[Microbatch], iteration: int) -> float:
        """Add the gradients of the microbatches' losses, each times its weight; returns the weighted sum of the losses.

        Args:
            table: all rows of the update.
            microbatches: microbatches of an optimizer step that this learner computes.
            iteration: counted from 1.
        """
        self._table, self._iteration = table, iteration
        adds_up = self._method.adds_up(iteration)
        work = [(group, self._parts(group[0].rows) if len(group) == 1 else []) for group in self._groups(microbatches)]
        self._backward_passes_left = sum(max(1, len(parts)) for _, parts in work)
        total = 0.0
        for group, parts in work:
            if len(parts) < 2:
                total += self._backward_together(group)
            else:
                total += (self._backward_parts if adds_up else self._backward_whole)(group[0], parts)
        return total

    def _backward_together(self, group: Sequence[Microbatch]) -> float:
        outputs = self._forward(np.concatenate([each.rows for each in group]))
        sizes = [int(self._table.lengths[torch.from_numpy(each.rows)].sum()) for each in group]
        pieces = zip(*(value.split(sizes) for value in outputs.values()), strict=True)
        losses = [
            each.weight * self._loss(each.rows, dict(zip(outputs, own, strict=True)), each.weight)
            for each, own in zip(group, pieces, strict=True)
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
        tokens = self._table.token_positions(microbatch.rows)
        place = torch.zeros(len(self._table.turn_ids), dtype=torch.int64)
        place[tokens] = torch.arange(len(tokens))
        places = [place[self._table.token_positions(part)].to(self._module.lm.device) for part in parts]
        whole: Outputs = {}
        with torch.no_grad():
            for position, part in zip(places, parts, strict=True):
                for name, value in self._forward(part).items():
                    whole.setdefault(name, value.new_zeros(len(tokens)))[position] = value
        whole = {name: value.requires_grad_() for name, value in whole.items()}
        loss = microbatch.weight * self._loss(microbatch.rows, whole, microbatch.weight)
        gradients = _gradients(loss, whole)
        for position, part in zip(places, parts, strict=True):
            own = {name: gradient[position] for name, gradient in gradients.items()}
            self._backward_pass(partial(self._forward, part), own)
        return loss.item()

    def _backward_loss(self, loss: torch.Tensor, outputs: Outputs) -> float:
        self._backward_pass(lambda: outputs, _gradients(loss, outputs))
        return loss.item()

    def _backward_pass(self, outputs: Callable[[], Outputs], gradients: Outputs) -> None:
        """Run a backward pass through the model, from the gradients of its outputs.

        A pass that would add zeros is skipped, except the last one, which gives parameters their gradients and starts sums over
        learners, and except passes of a sharded model, since its learners must make the same number of passes.
        """
        self._backward_passes_left -= 1
        carried = {name: gradient for name, gradient in gradients.items() if bool(gradient.any())}
        if not self._backward_passes_left:
            self._before_last()
        elif not carried and self._module.sharded is None:
            return
        # The empty passes of a sharded model hang on the log-probabilities, which may have no gradient.
        found, carried = outputs(), gradients if self._module.sharded is not None else carried or gradients
        torch.autograd.backward([found[name] for name in carried], [*carried.values()])

    def _loss(self, rows: np.ndarray, outputs: Outputs, weight: float) -> torch.Tensor:
        if not bool(torch.isfinite(outputs["logprobs"]).all()):
            self.broken = True
            # Goes through the backward pass like any loss, so that every learner sees it in its gradients and skips.
            return outputs["logprobs"].sum() * torch.nan
        tokens = TokenBatch.from_rows(self._table, rows, outputs["logprobs"].device)
        loss, logged = microbatch_loss(self._method, self._config, tokens, outputs, self._iteration)
        # Without a token to learn from there is nothing to measure.
        self._means.add(logged, weight if bool(tokens.mask.any()) else 0.0)
        return loss

    # -- what is computed together -----------------------------------------------------------------------------------

    def _groups(self, microbatches: Sequence[Microbatch]) -> Iterator[Sequence[Microbatch]]:
        """Consecutive microbatches with rows that fit into one forward pass; a microbatch that does not fit is a separate group."""
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
        # By each row's longest view; evidence is scored again only where there is a divergence.
        order = self._order(rows, hindsight=self._method.divergence is not None)
        parts = pass_parts(self._module.lm, order, self._config.max_tokens_per_forward)
        return [rows[part] for part in parts] if len(parts) > 1 else [rows]

    def _order(self, rows: np.ndarray, hindsight: bool = False) -> PrefixOrder:
        return PrefixOrder(self._table.sequences(rows, hindsight))

    def _forward(self, rows: np.ndarray) -> Outputs:
        """One forward pass over rows that fit into memory together; outputs ``[T]`` in the order of ``rows``."""
        config, divergence = self._config, self._method.divergence
        packed = lay_out(self._module.lm, self._order(rows), config.max_tokens_per_forward)
        self.counts.forwarded += packed.num_tokens
        self.counts.distinct += packed.num_distinct
        batch: dict[str, Any] = {"sequences": packed, "temperature": config.temperature}
        if divergence is not None:
            teacher = self._module.teacher or self._module.lm
            order = self._order(rows, hindsight=True)
            batch["hindsight_sequences"] = lay_out(teacher, order, config.max_tokens_per_forward)
            # The policy is the tempered one; the method's temperature divides its logits once more.
            temperature = config.temperature * divergence.temperature
            batch["divergence"] = {"mix": divergence.mix, "temperature": temperature}
        outputs: Outputs = self._module.forward_train(batch)
        return outputs


def _gradients(loss: torch.Tensor, outputs: Outputs) -> Outputs:
    """Gradients of the loss with respect to the outputs that it depends on; NaN for a loss of NaN."""
    leaves = {name: value for name, value in outputs.items() if value.requires_grad}
    found = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
