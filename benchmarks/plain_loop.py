"""A plain update: rows sorted by length, padded batches, one backward pass a batch.

The loop shares no code with the learner's passes. Its loss equals the learner's if the learner's is a mean over tokens: the
clipped surrogate, with each microbatch's token mean weighted by its share of the minibatch. Rows are sorted over the whole
minibatch, which such a loss allows. Only hidden states that predict response tokens pass through the output head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trial_ray.learner.rows import TurnRows
from trial_ray.learner.update_plan import Minibatch, UpdatePlan

CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.2, 3.0


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of rows, padded on the right.

    Attributes:
        input_ids: int64 ``[B, L]``; a response's last token is left out.
        where: rows and positions, int64 ``[T]`` each, of the states that predict the response tokens.
        targets: int64 ``[T]``.
        tokens: index of each target among all tokens of the update, int64 ``[T]``.
    """

    input_ids: torch.Tensor
    where: tuple[torch.Tensor, torch.Tensor]
    targets: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def from_rows(cls, table: TurnRows, rows: list[int]) -> PaddedBatch:
        turns = [table.turns[row] for row in rows]
        ids = [np.concatenate([turn.prompt_ids, turn.response_ids]) for turn in turns]
        padded = np.zeros((len(ids), max(map(len, ids)) - 1), np.int64)
        where: list[tuple[int, int]] = []
        for index, (turn, sequence) in enumerate(zip(turns, ids, strict=True)):
            padded[index, : len(sequence) - 1] = sequence[:-1]
            first = len(turn.prompt_ids) - 1
            where += [(index, position) for position in range(first, first + len(turn.response_ids))]
        positions = torch.tensor(where).T
        targets = torch.from_numpy(np.concatenate([turn.response_ids for turn in turns])).long()
        return cls(torch.from_numpy(padded), (positions[0], positions[1]), targets, table.token_positions(rows))


class PlainLoop:
    """Forward and backward passes of an update in plain PyTorch.

    Args:
        lm: the policy.
        table: rows with old log-probabilities and advantages.
        plan: the minibatches.
        tokens_per_batch: maximum number of tokens in a batch, padding included.
        temperature: temperature by which logits are divided.
    """

    def __init__(
        self,
        lm: torch.nn.Module,
        table: TurnRows,
        plan: UpdatePlan,
        tokens_per_batch: int,
        temperature: float,
    ) -> None:
        self.lm, self._table, self._plan = lm, table, plan
        self._tokens_per_batch, self._temperature = tokens_per_batch, temperature
        lengths = table.lengths
        self._advantages = table.advantages.float().repeat_interleave(lengths)

    def update(self, on_gradient=None) -> float:
        """Run forward and backward passes of all minibatches; return their seconds.

        Args:
            on_gradient: called after each minibatch, outside of the measured time; the gradient is in the parameters.
        """
        seconds = 0.0
        for minibatch in self._plan.steps:
            began = time.perf_counter()
            self.lm.zero_grad(set_to_none=True)
            weights = self._token_weights(minibatch)
            for batch in self._batches(np.concatenate([each.rows for each in minibatch])):
                (self._token_losses(batch) * weights[batch.tokens]).sum().backward()
            seconds += time.perf_counter() - began
            if on_gradient is not None:
                on_gradient()
        return seconds

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        """Return the log-probabilities of all response tokens, ``[T]``."""
        result = torch.zeros(int(self._table.lengths.sum()))
        for batch in self._batches(np.arange(len(self._table))):
            result[batch.tokens] = self._logprobs(batch)
        return result

    def _token_weights(self, minibatch: Minibatch) -> torch.Tensor:
        """Return the weight of each token's loss in the minibatch, ``[T]``."""
        weights = torch.zeros(int(self._table.lengths.sum()))
        for microbatch in minibatch:
            tokens = self._table.token_positions(microbatch.rows)
            weights[tokens] = microbatch.weight / len(tokens)
        return weights

    def _batches(self, rows: np.ndarray) -> Iterator[PaddedBatch]:
        turns = self._table.turns
        lengths = {int(row): len(turns[row].prompt_ids) + len(turns[row].response_ids) - 1 for row in rows}
        batch: list[int] = []
        for row in sorted(lengths, key=lengths.__getitem__, reverse=True):
            if batch and (len(batch) + 1) * lengths[batch[0]] > self._tokens_per_batch:
                yield PaddedBatch.from_rows(self._table, batch)
                batch = []
            batch.append(row)
        yield PaddedBatch.from_rows(self._table, batch)

    def _logprobs(self, batch: PaddedBatch) -> torch.Tensor:
        hidden = self.lm.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state[batch.where]
        logits = self.lm.get_output_embeddings()(hidden) / self._temperature
        return torch.log_softmax(logits, -1).gather(-1, batch.targets[:, None]).squeeze(-1)

    def _token_losses(self, batch: PaddedBatch) -> torch.Tensor:
        advantages = self._advantages[batch.tokens]
        ratio = (self._logprobs(batch) - self._table.logprobs[batch.tokens]).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))
        return torch.where(advantages < 0, torch.minimum(losses, -DUAL_CLIP * advantages), losses)
