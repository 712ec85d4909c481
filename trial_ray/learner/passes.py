"""Forward and backward passes over the microbatches of an optimizer step, combined and split to fit into memory.

Microbatches that fit into memory together share a forward pass, so shared prefixes are computed once; each keeps its own loss.
A microbatch that does not fit is split into parts, which never changes the gradient. A loss that is a mean over tokens is the sum
of the parts' means, each weighted by the part's share of the tokens. Any other loss (one with the clamp of the TRIAL paper's
Eq. 8, or with a surrogate over whole sequences) is first computed on all rows of the microbatch without the model's graph, and
differentiated with respect to the log-probabilities; this gradient is then propagated through one part after the other.

If the loss of a pass has no gradient with respect to the model's outputs, the backward pass through the model is skipped, since
it would add zeros. An example is a loss that depends only on advantages, if all rollouts of a group have equal rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trial_ray.config.run import RunSettings
from trial_ray.learner.loss import WeightedMeans, microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.rows import TokenBatch, TurnRows
from trial_ray.learner.update_plan import Microbatch
from trial_ray.models.layout import pack_sequences, split_into_passes
from trial_ray.models.module import CausalLMModule
from trial_ray.models.prefix_tree import Ints, PrefixOrder
from trial_ray.objectives.divergences import k3_divergence

Outputs = dict[str, Tensor]
"""Results of the module's forward pass, each ``[T]`` in row order."""


@dataclass
class TokenCounts:
    """Number of input tokens of forward passes (including padding), and number of distinct prefixes of the rows in them."""

    forwarded: int = 0
    distinct: int = 0


@dataclass(frozen=True)
class Part:
    """Rows that have a common backward pass, because their activations fit into memory together.

    Attributes:
        rows: int64 ``[m]``, row numbers.
        order: prefix order of the rows' sequences.
        hindsight_order: prefix order of the sequences with the teacher context; ``None`` if the method has no divergence.
    """

    rows: Ints
    order: PrefixOrder
    hindsight_order: PrefixOrder | None


@dataclass(eq=False, repr=False)
class MicrobatchPasses:
    """Computes losses of microbatches and adds up their gradients.

    Attributes:
        module: the policy.
        method: method that is trained.
        means: accumulates the logged scalars.
        before_last: called by each call of :meth:`backward` before its last backward pass through the model.
        counts: numbers of tokens in the forward passes since the learner last reset the counts.
        broken: whether the policy gave log-probabilities that are not finite since this was last set to ``False``.
    """

    module: CausalLMModule
    method: Method[RunSettings]
    means: WeightedMeans
    before_last: Callable[[], None] = lambda: None
    counts: TokenCounts = field(default_factory=TokenCounts)
    broken: bool = False

    def backward(self, table: TurnRows, microbatches: Sequence[Microbatch], iteration: int) -> float:
        """Add the gradients of the microbatches' losses, each times its weight, and return the weighted sum of the losses.

        Args:
            table: all rows of the update.
            microbatches: microbatches of an optimizer step that this learner computes.
            iteration: counted from 1.
        """
        self._table, self._iteration = table, iteration
        backward_parts = self._backward_sum if self.method.adds_up(iteration) else self._backward_whole
        work = list(self._combined(microbatches))
        self._backward_passes_left = sum(len(parts) for _, parts in work)
        total = 0.0
        for members, parts in work:
            if len(parts) == 1:
                total += self._backward_together(members, parts[0])
            else:
                total += backward_parts(members[0], parts)
        return total

    def measure_update(self, microbatches: Sequence[Microbatch]) -> None:
        """Log ``grpo/update_kl``: the KL divergence between the policies after and before the update, on the first microbatch.

        The measurement is a forward pass without a graph. A sharded model is not measured, because its learners must make equal
        numbers of passes.

        Args:
            microbatches: microbatches of the first optimizer step that this learner computed with :meth:`backward`.
        """
        if not microbatches or self.module.sharded is not None:
            return
        counts, self.counts = self.counts, TokenCounts()
        for _, parts in self._combined(microbatches[:1]):
            for part in parts:
                with torch.no_grad():
                    logprobs = self._forward(part)["logprobs"]
                tokens = TokenBatch.from_rows(self._table, part.rows, logprobs.device)
                finite = bool(logprobs.isfinite().all())
                kl = k3_divergence(logprobs, tokens.old_logprobs, tokens.mask) if finite else logprobs.sum() * torch.nan
                self.means.add({"grpo/update_kl": kl}, int(tokens.mask.sum()))
        # Restore the counts from before the measurement, so that they do not include the tokens of its forward passes.
        self.counts = counts

    def _backward_together(self, microbatches: Sequence[Microbatch], part: Part) -> float:
        """Compute one or several microbatches in one pass, each with its own loss."""
        outputs = self._forward(part)
        sizes = [int(self._table.lengths[torch.from_numpy(microbatch.rows)].sum()) for microbatch in microbatches]
        pieces = zip(*(value.split(sizes) for value in outputs.values()), strict=True)
        losses = [
            microbatch.weight * self._loss(microbatch.rows, dict(zip(outputs, piece, strict=True)), microbatch.weight)
            for microbatch, piece in zip(microbatches, pieces, strict=True)
        ]
        return self._backward_loss(torch.stack(losses).sum(), outputs)

    def _backward_sum(self, microbatch: Microbatch, parts: Sequence[Part]) -> float:
        """Add the gradients of the losses of a microbatch's parts, and return the sum of these losses.

        Each loss is weighted by the part's share of the tokens to learn from.
        """
        counts = [int(self._table.mask[self._table.token_positions(part.rows)].sum()) for part in parts]
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            weight = microbatch.weight * count / max(1, sum(counts))
            outputs = self._forward(part)
            total += self._backward_loss(weight * self._loss(part.rows, outputs, weight), outputs)
        return total

    def _backward_whole(self, microbatch: Microbatch, parts: Sequence[Part]) -> float:
        """Differentiate the loss of the whole microbatch, then propagate the gradient through the model, part by part."""
        tokens = self._table.token_positions(microbatch.rows)
        index = torch.zeros(len(self._table.turn_ids), dtype=torch.int64)
        index[tokens] = torch.arange(len(tokens))
        indices = [index[self._table.token_positions(part.rows)].to(self.module.lm.device) for part in parts]
        whole: Outputs = {}
        with torch.no_grad():
            for positions, part in zip(indices, parts, strict=True):
                for name, value in self._forward(part).items():
                    whole.setdefault(name, value.new_zeros(len(tokens)))[positions] = value
        whole = {name: value.requires_grad_() for name, value in whole.items()}
        loss = microbatch.weight * self._loss(microbatch.rows, whole, microbatch.weight)
        gradients = _gradients(loss, whole)
        for positions, part in zip(indices, parts, strict=True):
            part_gradients = {name: gradient[positions] for name, gradient in gradients.items()}
            self._backward_pass(partial(self._forward, part), part_gradients)
        return loss.item()

    def _backward_loss(self, loss: Tensor, outputs: Outputs) -> float:
        self._backward_pass(lambda: outputs, _gradients(loss, outputs))
        return loss.item()

    def _backward_pass(self, forward: Callable[[], Outputs], gradients: Outputs) -> None:
        """Run a backward pass through the model, from the gradients of its outputs.

        A pass that would add zeros is skipped, with two exceptions: the last backward pass of an optimizer step, which sets the
        parameters' gradients and starts the sums over learners, and all passes of a sharded model, because its learners must make
        equal numbers of passes.

        Args:
            forward: returns the outputs with their graph; not called if the pass is skipped.
            gradients: gradients of the loss with respect to the outputs.
        """
        self._backward_passes_left -= 1
        nonzero = {name: gradient for name, gradient in gradients.items() if bool(gradient.any())}
        if not self._backward_passes_left:
            self.before_last()
        elif not nonzero and self.module.sharded is None:
            return
        # Omit outputs with a gradient of zero, except with FSDP, where every learner must make the backward pass.
        if self.module.sharded is None and nonzero:
            gradients = nonzero
        outputs = forward()
        torch.autograd.backward([outputs[name] for name in gradients], [*gradients.values()])

    def _loss(self, rows: Ints, outputs: Outputs, weight: float) -> Tensor:
        if not bool(torch.isfinite(outputs["logprobs"]).all()):
            self.broken = True
            # NaN goes through the backward pass like any loss, so that every learner sees it in its gradients and skips the step.
            return outputs["logprobs"].sum() * torch.nan
        tokens = TokenBatch.from_rows(self._table, rows, outputs["logprobs"].device)
        loss, metrics = microbatch_loss(self.method, tokens, outputs, self._iteration)
        # A microbatch without a token to learn from has no meaningful metrics.
        self.means.add(metrics, weight if bool(tokens.mask.any()) else 0.0)
        return loss

    def _combined(self, microbatches: Sequence[Microbatch]) -> Iterator[tuple[Sequence[Microbatch], list[Part]]]:
        """Divide microbatches into units of work; yield the microbatches and the parts (:class:`Part`) of each unit.

        A unit is either consecutive microbatches that fit into memory together, with one part that has all of their rows, one
        microbatch after the other; or it is a single microbatch that does not fit, with the parts into which it is split.
        """
        if not microbatches:
            return
        rows = np.concatenate([microbatch.rows for microbatch in microbatches])
        whole = self._part(rows)
        longest_view = whole.hindsight_order or whole.order
        pieces = split_into_passes(self.module.lm, longest_view, self.method.config.max_tokens_per_forward)
        if len(pieces) == 1:
            yield microbatches, [whole]
        elif len(microbatches) == 1:
            yield microbatches, [self._part(rows[piece]) for piece in pieces]
        else:
            middle = len(microbatches) // 2
            yield from self._combined(microbatches[:middle])
            yield from self._combined(microbatches[middle:])

    def _part(self, rows: Ints) -> Part:
        hindsight = None
        if self.method.divergence is not None:
            hindsight = PrefixOrder(self._table.sequences(rows, hindsight=True))
        return Part(rows, PrefixOrder(self._table.sequences(rows)), hindsight)

    def _forward(self, part: Part) -> Outputs:
        """Compute the module's outputs for the rows of ``part``, ``[T]`` in the order of the rows."""
        config, divergence = self.method.config, self.method.divergence
        packed = pack_sequences(self.module.lm, part.order, config.max_tokens_per_forward)
        self.counts.forwarded += packed.num_tokens
        self.counts.distinct += packed.num_distinct
        batch: dict[str, Any] = {"sequences": packed}
        if divergence is not None and part.hindsight_order is not None:
            teacher = self.module.teacher or self.module.lm
            batch["hindsight_sequences"] = pack_sequences(teacher, part.hindsight_order, config.max_tokens_per_forward)
            batch["divergence"] = {"mix": divergence.mix, "temperature": divergence.temperature}
        return self.module.forward_train(batch)


def _gradients(loss: Tensor, outputs: Outputs) -> Outputs:
    """Return the gradients of the loss with respect to the outputs that it depends on; NaN for a loss of NaN."""
    leaves = {name: value for name, value in outputs.items() if value.requires_grad}
    gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
