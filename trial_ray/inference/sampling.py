"""Draw the next token of every row of a batch, each row with its own temperature, nucleus and random number."""

from __future__ import annotations

import torch


def sample_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution, so that a row's draw does not depend on its neighbours.

    Args:
        logits: ``[B, V]``.
        temperatures: ``[B]``; 0 takes the most probable token.
        top_ps: ``[B]`` in (0, 1]: the smallest set of most probable tokens whose mass reaches it.
        uniforms: float64 ``[B]`` in [0, 1), one draw per row.

    Returns:
        Token ids int64 ``[B]`` and their log-probabilities under the untempered model float32 ``[B]``, in nats.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    greedy = temperatures <= 0
    # float64: a cumulative sum over a large vocabulary in float32 would drift by more than a rare token's mass.
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    probs = torch.softmax(scaled, dim=-1)
    if bool((top_ps < 1).any()):
        probs = _nucleus(probs, top_ps)
    cumulative = probs.cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    # Rounding can put the draw on or past the last bound.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _nucleus(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    ordered, index = probs.sort(dim=-1, descending=True)
    # A token stays while the mass before it is still short of top_p; the first always stays.
    outside = ordered.cumsum(-1) - ordered >= top_ps[:, None]
    outside[:, 0] = False
    return torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(outside, 0.0))
