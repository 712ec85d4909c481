"""Log-probabilities of given tokens, without storing the ``[T, vocabulary]`` logits.

The hidden states that predict target tokens are gathered first. The output head and the softmax then run over a few tokens at a
time, and the backward pass recomputes each chunk's logits instead of storing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trial_ray.models.prefix_tree import PackedSequences
from trial_ray.models.sharding import decoder_of
from trial_ray.models.tree_attention import attention_inputs
from trial_ray.objectives.divergences import generalised_jsd
from trial_ray.process import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_CHUNK_TOKENS = 1024
"""Number of tokens whose logits are in memory at a time: 0.6 GB in float32 with a vocabulary of 152,000 tokens."""


class _WideProduct(torch.autograd.Function):
    """``hidden @ weight.T`` with bfloat16 or float16 inputs and a float32 result; the weights' gradient is float32, too.

    Autocast would also round the result to bfloat16, which is too coarse for TRIAL's small differences of log-probabilities.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, short: Tensor) -> Tensor:
        """Compute the product; ``short [V, H]`` is ``weight`` in bfloat16 or float16, converted once for all chunks."""
        hidden = hidden.to(short.dtype)
        ctx.save_for_backward(hidden, short)
        return _wide_product(hidden, short.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of ``hidden``, of ``weight`` (float32, or ``None`` if it is frozen), and of ``short`` (none)."""
        hidden, short = ctx.saved_tensors
        gradient = gradients[0].to(short.dtype)
        weight_gradient = _wide_product(gradient.T, hidden) if ctx.needs_input_grad[1] else None
        return gradient @ short, weight_gradient, None


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left @ right`` of bfloat16 or float16 matrices, with a float32 result."""
    with torch.autocast(left.device.type, enabled=False):
        if left.device.type == "cuda":
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()


def _short_weight(head: Head, device: str) -> Tensor | None:
    """Return the head's matrix in the dtype of forward passes if that is bfloat16 or float16; otherwise ``None``."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return weight.detach().to(dtype) if dtype in (torch.bfloat16, torch.float16) else None


def _logits(hidden: Tensor, head: Head, short: Tensor | None) -> Tensor:
    """Compute the head's output ``[N, vocabulary]`` in float32 or wider; ``short`` is the result of :func:`_short_weight`."""
    if isinstance(head, TransformingHead):
        return head.logits(hidden, short)
    if short is None:
        return head(hidden)
    logits: Tensor = _WideProduct.apply(hidden, head.weight, short)  # type: ignore[no-untyped-call]  # torch lacks types
    return logits if (bias := getattr(head, "bias", None)) is None else logits + bias


class TransformingHead:
    """Output head that runs the model's own code after the decoder, for models that cap or scale logits or the head's inputs.

    Args:
        lm: the model; its forward pass is run with given outputs of the decoder.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self._lm = lm
        self._layer = lm.get_output_embeddings()

    @property
    def weight(self) -> Tensor:
        """Weight of the output layer, ``[vocabulary, H]``."""
        return self._layer.weight

    def logits(self, hidden: Tensor, short: Tensor | None) -> Tensor:
        """Compute the model's logits ``[N, vocabulary]`` of hidden states ``[N, H]``; ``short`` as in :func:`_logits`."""
        plain = self._layer.forward

        def product(states: Tensor) -> Tensor:
            return plain(states) if short is None else _logits(states[0], self._layer, short)[None]

        return _own_logits(self._lm, hidden, product)


Head = nn.Module | TransformingHead


class _DecoderOutputs:
    """Decoder outputs that contain only the last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _own_logits(lm: PreTrainedModel, hidden: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute logits ``[N, vocabulary]`` of ``hidden [N, H]`` by the model's code, with ``product`` as the output layer."""
    outputs = _DecoderOutputs(hidden[None])
    # Make the decoder (and, in models that read images, also the module that contains it) return `outputs`.
    bodies = {lm.base_model, decoder_of(lm)} - {lm}
    replaced: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(bodies, lambda *_, **__: outputs)
    replaced[lm.get_output_embeddings()] = product
    before = {module: vars(module).get("forward") for module in replaced}
    for module, forward in replaced.items():
        module.forward = forward
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return lm.forward(input_ids=ids, use_cache=False).logits[0]
    finally:
        for module, original in before.items():
            if original is None:
                del module.forward
            else:
                module.forward = original


def output_head(lm: PreTrainedModel) -> Head:
    """Return a model's output layer, or a :class:`TransformingHead` if the model transforms the layer's inputs or logits."""
    plain: bool | None = lm.__dict__.get("_plain_head")
    if plain is None:
        inputs: list[Tensor] = []
        # Use small and large logits, so that a cap of any size has an effect.
        hidden, logits = torch.linspace(-3.0, 3.0, 8)[:, None], torch.logspace(-3, 6, 8)[:, None]

        def product(states: Tensor) -> Tensor:
            inputs.append(states)
            return logits[None]

        outputs = _own_logits(lm, hidden, product)
        plain = lm.__dict__["_plain_head"] = torch.equal(outputs, logits) and torch.equal(inputs[0], hidden[None])
    return lm.get_output_embeddings() if plain else TransformingHead(lm)


def _in_chunks(
    function: Callable[..., Any], chunk_tokens: int, hidden: Tensor, *others: Tensor | None
) -> Iterator[Any]:
    """Yield a function's results for chunks of the tensors' rows; the backward pass recomputes each result.

    The function gets no argument for a tensor that is ``None``.
    """
    # Call the function once for empty tensors, so that the head's parameters are in the graph.
    for start in range(0, max(1, len(hidden)), chunk_tokens):
        inputs = [tensor[start : start + chunk_tokens] for tensor in (hidden, *others) if tensor is not None]
        if torch.is_grad_enabled():
            yield checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            yield function(*inputs)


def gather_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperatures: Tensor | None = None,
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    second: Literal["entropy", "is_top"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target token and, if requested, a second result.

    Args:
        hidden: ``[N, H]`` last hidden states, each at the position that predicts its target.
        head: result of :func:`output_head`, or a layer ``[N, H] -> [N, vocabulary]``.
        targets: ids of the target tokens, int64 ``[N]``.
        temperatures: ``[N]``, positive divisors of each row's logits, or ``None`` if all are 1.
        chunk_tokens: maximum number of rows of logits in memory at a time. It changes memory and speed, never the result.
        second: the second result: the ``"entropy"`` of each token's distribution or, with ``"is_top"``, whether the target is the
            most likely token.

    Returns:
        ``(logprobs [N], second result [N])``; the second result is empty if ``second`` is ``None``. Log-probabilities and
        entropies are in nats, float32 or, for a float64 model, float64.
    """
    short = _short_weight(head, hidden.device.type)

    def scored(hidden: Tensor, targets: Tensor, *temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = _tempered(_logits(hidden, head, short), *temperatures)
        normalizer = torch.logsumexp(logits, dim=-1)
        target_logits = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        logprobs = target_logits - normalizer
        if second is None:
            return logprobs, logprobs.new_empty(0)
        if second == "is_top":
            return logprobs, target_logits == logits.amax(-1)
        all_logprobs = logits - normalizer.unsqueeze(-1)
        return logprobs, -(all_logprobs.exp() * all_logprobs).sum(dim=-1)

    logprobs, others = zip(*_in_chunks(scored, chunk_tokens, hidden, targets, temperatures), strict=True)
    return torch.cat(logprobs), torch.cat(others)


def _tempered(logits: Tensor, *temperatures: Tensor) -> Tensor:
    """Divide logits ``[N, V]`` by the temperatures of their rows, ``[N]``, if there are any."""
    for temperature in temperatures:
        logits = logits / temperature.to(logits.dtype)[:, None]
    return logits


def gather_divergence(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    temperatures: Tensor | None = None,
    *,
    mix: float,
    temperature: float,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence between two models' next-token distributions, ``[N]`` in nats.

    Args:
        hidden: ``[N, H]``, the policy's last hidden states; they and ``head`` receive gradients.
        head: the policy's output head, from :func:`output_head`.
        teacher_hidden: ``[N, H]``, the teacher's hidden states for the same tokens, with the teacher context.
        teacher_head: the teacher's output head, from :func:`output_head`.
        temperatures: ``[N]``, positive divisors of each row's logits in both models, or ``None`` if all are 1.
        mix: the teacher's share in the mixture of both distributions.
        temperature: divides both models' logits once more.
        chunk_tokens: maximum number of rows of logits in memory at a time, for each model.
    """
    device = hidden.device.type
    short, teacher_short = _short_weight(head, device), _short_weight(teacher_head, device)

    def divergence(student: Tensor, teacher: Tensor, *temperatures: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = _tempered(_logits(teacher, teacher_head, teacher_short), *temperatures)
        logits = _tempered(_logits(student, head, short), *temperatures)
        # Models of a family share a vocabulary, but may pad their embeddings to other sizes.
        shared = min(logits.shape[-1], teacher_logits.shape[-1])
        return generalised_jsd(logits[:, :shared], teacher_logits[:, :shared], mix, temperature)

    return torch.cat([*_in_chunks(divergence, chunk_tokens, hidden, teacher_hidden, temperatures)])


def hidden_states(lm: PreTrainedModel, packed: PackedSequences) -> Iterator[tuple[Tensor, slice]]:
    """Run the decoder on each pack; yield the last layer's states at the positions ``packed.nodes``, which predict target tokens.

    Each item has the states of one pack, and the slice of ``packed.nodes`` to which they belong. Only the states of one pack are in
    memory at a time, unless the caller keeps them.
    """
    lengths = torch.tensor([pack.input_ids.numel() for pack in packed.packs])
    ends = lengths.cumsum(0)
    # packed.nodes is in ascending order, so the nodes of a pack are a slice of it.
    bounds = [0, *torch.searchsorted(packed.nodes, ends.to(packed.nodes.device)).tolist()]
    for pack, first, start, stop in zip(packed.packs, (ends - lengths).tolist(), bounds[:-1], bounds[1:], strict=True):
        tree: dict[str, Any] = {}
        if pack.exits is not None:
            tree = {"position_ids": pack.position_ids, **attention_inputs(lm, pack.exits)}
        outputs = decoder_of(lm)(input_ids=pack.input_ids, use_cache=False, **tree)
        states = outputs.last_hidden_state.flatten(0, 1)[packed.nodes[start:stop] - first]
        del outputs
        advance()
        yield states, slice(start, stop)


def all_hidden_states(lm: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Return the results of :func:`hidden_states` for all packs together, ``[U, H]`` (:class:`PackedSequences`)."""
    return torch.cat([states for states, _ in hidden_states(lm, packed)])


def sequence_logprobs(lm: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Compute the log-probabilities of the targets of packed sequences under a transformers causal language model.

    Args:
        lm: a ``...ForCausalLM`` with a decoder and an output embedding (tied or not).
        packed: the sequences.

    Returns:
        Log-probabilities as in :func:`gather_logprobs`, ``[T]``, in the order of the sequences.
    """
    head = output_head(lm)
    dtype = torch.float64 if lm.dtype == torch.float64 else torch.float32
    # Allocate the result first: separate results of packs would fragment the memory that each pack frees.
    logprobs = torch.zeros(len(packed.targets), dtype=dtype, device=lm.device)
    for states, nodes in hidden_states(lm, packed):
        temperatures = None if packed.temperatures is None else packed.temperatures[nodes]
        logprobs[nodes], _ = gather_logprobs(states, head, packed.targets[nodes], temperatures)
    return logprobs[packed.tokens]
