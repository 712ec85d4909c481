"""How a response is sampled: the draw of each next token, and the tokens that end it, one rule for every engine."""

from __future__ import annotations

from pathlib import Path

import torch

from trial_ray.errors import ConfigError


def sample_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of every row of a batch by inverting its cumulative distribution, independently of other rows.

    Args:
        logits: ``[B, V]``.
        temperatures: ``[B]``; 0 takes the most probable token.
        top_ps: ``[B]`` in (0, 1]: the smallest set of most probable tokens whose mass reaches it.
        uniforms: float64 ``[B]`` in [0, 1), one draw per row.

    Returns:
        Token ids int64 ``[B]`` and their log-probabilities float32 ``[B]``, in nats, under the distribution that each was
        drawn from: ``logits / temperature``, renormalised over the nucleus. A greedy row's are those of the model as it
        is: the distribution that it was drawn from has only one token.
    """
    greedy = temperatures <= 0
    # float64: a cumulative sum over a large vocabulary in float32 would drift by more than a rare token's mass.
    scaled = logits.double() / torch.where(greedy, 1.0, temperatures)[:, None]
    if bool((top_ps < 1).any()):
        scaled = _keep_nucleus(scaled, torch.where(greedy, 1.0, top_ps))
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    # Rounding can put the draw on or past the last bound.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


def _keep_nucleus(logits: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Put every logit outside the nucleus to minus infinity."""
    ordered, index = logits.sort(dim=-1, descending=True)
    probs = torch.softmax(ordered, dim=-1)
    # A token stays while the mass before it is still short of top_p; the first always stays.
    outside = probs.cumsum(-1) - probs >= top_ps[:, None]
    outside[:, 0] = False
    return torch.empty_like(logits).scatter(-1, index, ordered.masked_fill(outside, -torch.inf))


def stop_token_ids(model_path: str) -> list[int]:
    """Collect the stop tokens of a model folder: generation config, model config and tokenizer, ascending.

    A chat model often names its end-of-turn token only in ``generation_config.json`` and its end-of-text token only
    in the tokenizer; a response ends at either.

    Raises:
        ConfigError: ``model_path`` is no folder, so that missing files could not be told from files not fetched.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    found: set[int] = set()
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"model_path: {model_path!r} found, a model folder expected; fetch the model first.")
    if (folder / "generation_config.json").exists():
        found |= _as_set(GenerationConfig.from_pretrained(model_path).eos_token_id)
    found |= _as_set(AutoConfig.from_pretrained(model_path).eos_token_id)
    if (folder / "tokenizer_config.json").exists():
        found |= _as_set(AutoTokenizer.from_pretrained(model_path).eos_token_id)
    return sorted(found)


def _as_set(eos: int | list[int] | None) -> set[int]:
    if eos is None:
        return set()
    return set(eos) if isinstance(eos, list) else {eos}
