"""Log-probabilities of given tokens, without ever holding the ``[T, vocabulary]`` logits.

The hidden states that predict a wanted token are gathered first; the output head and the softmax then run over a few
tokens at a time, and the backward pass computes each chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trial_ray.errors import ConfigError
from trial_ray.models.prefix_tree import PackedSequences
from trial_ray.models.tree_attention import attention_inputs
from trial_ray.objectives.divergences import generalised_jsd
from trial_ray.process_reports import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_CHUNK_TOKENS = 1024
"""Tokens whose logits are held at a time: 0.6 GB of float32 at a vocabulary of 152 k."""

_NEUTRAL_LOGIT_SETTINGS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}
"""Settings with which a model changes the head's output after the head, and the value that changes nothing."""


class _WideProduct(torch.autograd.Function):
    """``hidden @ weight.T`` in float32, of numbers of a shorter type; the gradient of the weights is in float32, too.

    Autocast rounds results to bfloat16, too; TRIAL's signal is a small difference of two numbers that come from them.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
        """``short [V, H]`` is ``weight`` in the type of the products, made once for all chunks."""
        hidden = hidden.to(short.dtype)
        ctx.save_for_backward(hidden, short)
        return _wide_product(hidden, short.T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Of ``hidden`` and ``weight``, in their types; none of a frozen head's weights."""
        hidden, short = ctx.saved_tensors
        gradient = gradients[0].to(short.dtype)
        of_weight = _wide_product(gradient.T, hidden) if ctx.needs_input_grad[1] else None
        return gradient @ short, of_weight, None


def _wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` in float32, of matrices of a shorter type."""
    with torch.autocast(left.device.type, enabled=False):
        if left.device.type == "cuda":
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()


def _short_weight(head: nn.Module, device: str) -> torch.Tensor | None:
    """The head's matrix in the type in which its products are computed; ``None`` where that is float32 or wider."""
    weight = head.weight
    assert isinstance(weight, torch.Tensor)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return weight.detach().to(dtype) if dtype in (torch.bfloat16, torch.float16) else None


def _logits(hidden: torch.Tensor, head: nn.Module, short: torch.Tensor | None) -> torch.Tensor:
    """The head's output ``[N, vocabulary]`` in float32 or wider; ``short`` as :func:`_short_weight` gave it."""
    if short is None:
        return cast(torch.Tensor, head(hidden))
    logits: torch.Tensor = _WideProduct.apply(hidden, head.weight, short)  # type: ignore[no-untyped-call]  # torch's
    return logits if (bias := getattr(head, "bias", None)) is None else logits + bias


def _chunk_logprobs(
    hidden: torch.Tensor,
    head: nn.Module,
    short: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = _logits(hidden, head, short)
    if temperature != 1.0:
        logits = logits / temperature
    normalizer = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    if not with_entropy:
        return logprobs, logprobs.new_empty(0)
    all_logprobs = logits - normalizer.unsqueeze(-1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(dim=-1)


def gather_logprobs(
    hidden: torch.Tensor,
    head: nn.Module,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target token, and on request the entropy of the distribution it came from.

    Args:
        hidden: ``[N, H]`` last hidden states, each at the position that predicts its target.
        head: output embedding, ``[N, H] -> [N, vocabulary]``.
        targets: int64 ``[N]``.
        temperature: divides the logits; positive.
        chunk_tokens: most rows of logits alive at once. It changes memory and speed, never the result.
        with_entropy: whether to return the entropies too.

    Returns:
        ``(logprobs [N], entropy [N] or None)`` in nats; float32, or float64 for a float64 model.

    Raises:
        ValueError: shapes disagree, or ``temperature`` or ``chunk_tokens`` is not positive.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden must be [N, H] and targets [N]; got {list(hidden.shape)} and {list(targets.shape)}")
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"temperature and chunk_tokens must be positive; got {temperature} and {chunk_tokens}")
    logprobs, entropies = [], []
    short = _short_weight(head, hidden.device.type)
    # An empty input still passes once, so that data-parallel backward finds every parameter in the graph.
    for start in range(0, max(1, len(targets)), chunk_tokens):
        inputs = (hidden[start : start + chunk_tokens], head, short, targets[start : start + chunk_tokens])
        if torch.is_grad_enabled():
            chunk = checkpoint(
                _chunk_logprobs, *inputs, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False
            )
        else:
            chunk = _chunk_logprobs(*inputs, temperature, with_entropy)
        logprobs.append(chunk[0])
        entropies.append(chunk[1])
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def gather_divergence(
    hidden: torch.Tensor,
    head: nn.Module,
    teacher_hidden: torch.Tensor,
    teacher_head: nn.Module,
    *,
    mix: float,
    temperature: float,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence between two models' next-token distributions, ``[N]`` in nats.

    Args:
        hidden: ``[N, H]``, the policy's last hidden states; they and ``head`` receive gradients.
        head: the policy's output embedding.
        teacher_hidden: ``[N, H]``, the teacher's hidden states for the same tokens in its own view.
        teacher_head: the teacher's output embedding.
        mix: the teacher's share of the mixture.
        temperature: divides both models' logits.
        chunk_tokens: most rows of logits alive at once, of each model.
    """
    short, teacher_short = (_short_weight(each, hidden.device.type) for each in (head, teacher_head))

    def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = _logits(teacher, teacher_head, teacher_short)
        return generalised_jsd(_logits(student, head, short), teacher_logits, mix, temperature)

    chunks = range(0, max(1, len(hidden)), chunk_tokens)
    parts = [(hidden[start : start + chunk_tokens], teacher_hidden[start : start + chunk_tokens]) for start in chunks]
    if not torch.is_grad_enabled():
        return torch.cat([divergence(*part) for part in parts])
    return torch.cat([checkpoint(divergence, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def check_plain_head(lm: PreTrainedModel) -> None:
    """Refuse a model that changes its logits after the output head.

    Raises:
        ConfigError: the model's config caps or scales logits (as Gemma, Cohere and Granite do).
    """
    for name, neutral in _NEUTRAL_LOGIT_SETTINGS.items():
        value = getattr(lm.config, name, None)
        if value is not None and value != neutral:
            raise ConfigError(
                f"{type(lm).__name__} sets {name}={value}, which changes the logits after the output head; "
                "expected a model without it, such as Qwen2, Qwen3 or Llama. Choose another model."
            )


def hidden_states(lm: PreTrainedModel, packed: PackedSequences) -> Iterator[tuple[torch.Tensor, slice]]:
    """Last hidden states of the predicting nodes, pack by pack: ``[n, H]``, and which of the U nodes they belong to.

    Only the states of one pack are alive at a time, unless the caller keeps them.
    """
    lengths = torch.tensor([pack.input_ids.numel() for pack in packed.packs])
    ends = lengths.cumsum(0)
    # The nodes are in ascending order.
    bounds = [0, *torch.searchsorted(packed.nodes, ends.to(packed.nodes.device)).tolist()]
    for pack, first, start, stop in zip(packed.packs, (ends - lengths).tolist(), bounds[:-1], bounds[1:], strict=True):
        attention = {} if pack.exits is None else attention_inputs(lm, pack.exits)
        outputs = lm.get_decoder()(
            input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, **attention
        )
        states = outputs.last_hidden_state.flatten(0, 1)[packed.nodes[start:stop] - first]
        del outputs
        advance("forward pass")
        yield states, slice(start, stop)


def sequence_logprobs(
    lm: PreTrainedModel,
    packed: PackedSequences,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the targets of packed sequences under a transformers causal language model.

    Args:
        lm: a ``...ForCausalLM`` with a decoder and an output embedding (tied or not).
        packed: the sequences.
        temperature: as in :func:`gather_logprobs`.
        chunk_tokens: as there.
        with_entropy: as there.

    Returns:
        As :func:`gather_logprobs`, ``[T]``, in the order of the sequences.

    Raises:
        ConfigError: the model changes its logits after the head.
    """
    check_plain_head(lm)
    dtype = torch.float64 if lm.dtype == torch.float64 else torch.float32
    # Made first: results of each pack would lie between the blocks that it frees, and keep them from being used again as a whole.
    results = [torch.zeros(len(packed.targets), dtype=dtype, device=lm.device) for _ in range(1 + with_entropy)]
    for states, nodes in hidden_states(lm, packed):
        values = gather_logprobs(
            states,
            lm.get_output_embeddings(),
            packed.targets[nodes],
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )
        for result, value in zip(results, filter(torch.is_tensor, values), strict=True):
            result[nodes] = value
    logprobs, *entropy = (result[packed.tokens] for result in results)
    return logprobs, entropy[0] if entropy else None
