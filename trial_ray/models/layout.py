"""Layout of rows (token sequences) in a model's forward passes, chosen by a comparison with transformers' own code.

A model's config has no field for three properties: whether it supports prefix-tree masks, whether rows of unequal length may
share a pass, and which attention implementation computes the same as the model's own code. A small model of the same config,
with random weights, is therefore scored in each layout and compared with its own forward pass, one row after the other. It has
few and narrow layers of every kind, so the comparison costs about the same for any config. Its attention windows are shorter
than the test rows.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trial_ray.errors import ConfigError, first_line
from trial_ray.files import Json
from trial_ray.models import tree_attention
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import Ints, PackedSequences, PrefixOrder, ScoredSequence, pack_padded, pack_trees
from trial_ray.models.sharding import decoder_of
from trial_ray.models.tensors import stored_tensors
from trial_ray.models.tree_attention import accepts_blocks, block_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

Rows = Literal["tree", "padded", "one length"]
"""How rows share a forward pass: as a prefix tree; padded on the right; or only rows of one length, for models in which a
longer row changes the results of other rows."""

TOLERANCE = 1e-3
"""Maximum error of a layout's log-probabilities, in nats. Rounding gives at most 1e-5; known wrong layouts give at least 1e-2."""


@dataclass(frozen=True)
class Layout:
    """Layout in which a model is scored.

    Attributes:
        rows: how rows share a forward pass.
        attention: ``attn_implementation`` of the loaded model.
    """

    rows: Rows
    attention: str


def layout_of(lm: PreTrainedModel) -> Layout:
    """Return the layout of a loaded model, for the attention implementation that it was loaded with.

    Raises:
        ConfigError: no layout reproduces the model's own log-probabilities.
    """
    layout: Layout | None = vars(lm).get("_layout")
    if layout is None:
        set_layout(lm, layout := measured_layout(lm.config, lm.config._attn_implementation))
    return layout


def set_layout(lm: PreTrainedModel, layout: Layout) -> None:
    """Store a model's layout, for :func:`layout_of`."""
    vars(lm)["_layout"] = layout


def measured_layout(config: PretrainedConfig, attention: str | None = None) -> Layout:
    """Return the cheapest layout that reproduces the log-probabilities of rows that are scored one at a time.

    Args:
        config: config of a causal language model.
        attention: the only attention implementation to test; ``None`` tests this package's, transformers' default and ``"eager"``.

    Raises:
        ConfigError: no layout reproduces the log-probabilities.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None  # A model that was created with this config may have set _attn_implementation.
    key = config.to_json_string(use_diff=False), attention
    if key not in _measured:
        _measured[key] = _measure(config, attention)
    return _measured[key]


_measured: dict[tuple[str, str | None], Layout] = {}
"""Results of :func:`measured_layout`, by the config's content and ``attention``."""


def _measure(config: PretrainedConfig, attention: str | None) -> Layout:
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad(), _quiet():
        own = _small_model(config)
        with torch.device("meta"):
            default = attention or str(_build(config).config._attn_implementation)
        if isinstance(own, str):
            # If no layouts can be compared, use rows of one length: without padding, the model's own forward pass is correct.
            logger.warning(
                "%s: rows are scored one length at a time, because layouts cannot be compared: %s",
                config.model_type,
                own,
            )
            return Layout("one length", default)
        rows = _rows(own.config.get_text_config().vocab_size)
        expected = _own_logprobs(own, rows)
        name = type(own).__name__
        failures: list[str] = []
        for kind, implementation in _candidates(default, attention):
            described = f"{'a prefix tree' if kind == 'tree' else f'{kind} rows'} with {implementation} attention"
            try:
                lm = _build(own.config, attn_implementation=implementation)
                lm.load_state_dict(own.state_dict())
                separate = max(_difference(lm, kind, [row], value) for row, value in zip(rows, expected, strict=True))
                together = _difference(lm, kind, rows, torch.cat(expected))
            except Exception as error:  # The model's code may raise anything; the final ConfigError lists all failures.
                failures.append(f"{described}: {type(error).__name__}: {first_line(error)}")
                continue
            if max(separate, together) <= TOLERANCE:
                if kind != "tree":
                    logger.warning("Rows of %s are padded, and shared prefixes are recomputed: %s", name, failures[0])
                return Layout(kind, implementation)
            failures.append(f"{described}: rows together differ by {together:.2g} nats, separately by {separate:.2g}")
    raise ConfigError(
        f"{name} cannot be scored: its log-probabilities differ from transformers' own in every layout, expected at most "
        f"{TOLERANCE:g} nats. Found with a small random model of its config: {'; '.join(failures)}. Choose another model."
    )


def _own_logprobs(own: PreTrainedModel, rows: Sequence[ScoredSequence]) -> list[Tensor]:
    """Compute the log-probabilities of each row separately, with the model's own forward pass.

    Raises:
        ConfigError: log-probabilities depend on later tokens, or on the rows that were scored before.
    """

    def logprobs(row: ScoredSequence) -> Tensor:
        logs: Tensor = own(input_ids=torch.from_numpy(row.inputs)[None], use_cache=False).logits[0].log_softmax(-1)
        return logs.gather(-1, torch.from_numpy(row.ids)[1:, None])[:, 0]

    forwards = [logprobs(row) for row in rows]
    backwards = [logprobs(row) for row in rows[::-1]][::-1]
    # The first two rows differ only in their last two tokens, so the log-probabilities of all earlier tokens must be equal.
    for failure, pairs in (
        ("another last token changes log-probabilities before it", [(forwards[0][:-2], forwards[1][:-2])]),
        ("a row's log-probabilities depend on the rows scored before it", list(zip(forwards, backwards, strict=True))),
    ):
        if not (change := max((first - second).abs().max().item() for first, second in pairs)) <= TOLERANCE:
            raise ConfigError(
                f"{type(own).__name__} cannot be scored: {failure}, by {change:.2g} nats. Choose another model."
            )
    return forwards


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' messages about the settings of the small model with which layouts are compared."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _candidates(default: str, attention: str | None) -> list[tuple[Rows, str]]:
    # This package's attention has an advantage only for trees, so it is no default candidate for the other layouts.
    candidates: dict[Rows, list[str]] = {
        "tree": [tree_attention.register(), default],
        "padded": [default, "eager"],
        "one length": [default, "eager"],
    }
    return [
        (kind, implementation)
        for kind in candidates
        for implementation in dict.fromkeys([attention] if attention else candidates[kind])
    ]


def pack_rows(lm: PreTrainedModel, rows: Rows, order: PrefixOrder, max_tokens: int) -> PackedSequences:
    """Pack sequences for a model, with at most ``max_tokens`` inputs per pack."""
    if rows == "tree":
        return pack_trees(order, max_tokens, lm.device, tree_attention.block_size(lm))
    return pack_padded(order, max_tokens, lm.device, mixed=rows == "padded")


def _difference(lm: PreTrainedModel, kind: Rows, rows: Sequence[ScoredSequence], expected: Tensor) -> float:
    logprobs = sequence_logprobs(lm, pack_rows(lm, kind, PrefixOrder(rows), max_tokens=ROW_TOKENS * len(rows)))
    difference = (logprobs - expected).abs().max().item()
    return difference if difference == difference else float("inf")


def _rows(vocabulary: int) -> list[ScoredSequence]:
    """Return random test rows: some that differ only at the end, some with a common prefix, some of unequal length."""
    generator = np.random.default_rng(0)
    first, second = (
        generator.integers(min(WINDOW, vocabulary // 2), min(VOCABULARY, vocabulary), ROW_TOKENS) for _ in range(2)
    )
    changed = first.copy()
    changed[-2:] = second[-2:]
    fork = np.concatenate((first[:10], second[:7]))
    return [ScoredSequence(ids, len(ids) - 1) for ids in (first, changed, fork, second, second[::-1][:5].copy())]


VOCABULARY = 64
ROW_TOKENS = 24
"""Number of tokens in the longest of the rows with which layouts are compared."""
WINDOW = 8
"""Attention windows, chunks and original context lengths are set to this in the small test model; test rows exceed it."""
_NARROW, _HEAD = 64, 8
"""Minimum hidden size and minimum size of attention heads of a narrowed config, for a comparison of layouts."""
_MAX_PARAMETERS = 2**29
_GAIN = 1.5
"""Scale of the random matrices of the small model with which layouts are tested. It is above 1, so that activations are large
enough for attention's caps and sinks to have an effect."""


def _build(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
    """Build a float32 model of a config, which is not changed; ``settings`` go to ``from_config``."""
    from transformers import AutoModelForCausalLM

    lm: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False, **settings
    )
    lm.eval()
    return lm


def _small_model(config: PretrainedConfig) -> PreTrainedModel | str:
    """Return a random model of the smallest version of a config that transformers can run; if none runs, the reason."""
    configs, failure = _small_configs(config), ""
    while True:
        try:
            if (small := next(configs, None)) is None:
                return failure
            if (size := sum(math.prod(shape) for shape in _shapes(small).values())) > _MAX_PARAMETERS:
                failure = f"{size:,} parameters are too many for a comparison"
            elif (lm := _random_model(small)) is not None:
                return _with_short_windows(lm)
            else:
                failure = "logits are not finite"
        except Exception as error:  # The code of transformers raises many types of errors; the caller reports them.
            failure = f"{type(error).__name__}: {first_line(error)}"


def _random_model(config: PretrainedConfig) -> PreTrainedModel | None:
    """Return a random model with eager attention, or ``None`` if its logits are not finite."""
    lm = _build(config, attn_implementation="eager")
    _randomise(lm)
    ids = torch.arange(ROW_TOKENS)[None] % config.get_text_config().vocab_size
    return lm if bool(lm(input_ids=ids, use_cache=False).logits.isfinite().all()) else None


def _small_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield versions of a config to try: first with few narrow layers of every kind, last the config itself."""
    text = config.get_text_config()
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    # If no setting gives the size of heads, it is the hidden size divided by their number.
    heads = 1 if vars(text).get("head_dim") else int(getattr(text, "num_attention_heads", None) or 1)
    factor = 2 ** min(4, int(math.log2(max(1, hidden // max(_NARROW, _HEAD * heads)))))
    for count in dict.fromkeys((_layers_of_every_kind(config), layers)):
        # Try several values of min_width: if a size is a product of others, only one of these may be divided together with it.
        for min_width in (_NARROW + 1, _NARROW, _NARROW // 2) if factor > 1 else ():
            yield _smaller(config, count, factor, min_width)
        yield _smaller(config, count)
    yield copy.deepcopy(config)


def _smaller(config: PretrainedConfig, count: int, factor: int = 1, min_width: int = 0) -> PretrainedConfig:
    """Copy a config, with a small vocabulary and ``count`` layers; integers of at least ``min_width`` are divided by ``factor``."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    vocabulary, layers = min(VOCABULARY, text.vocab_size), text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:count])
        elif name.endswith("_token_id"):
            if isinstance(value, int) and value >= vocabulary:
                setattr(text, name, 0)
        elif type(value) is int and value >= min_width:
            setattr(text, name, value // factor)
    text.vocab_size, text.num_hidden_layers = vocabulary, count
    for name in small.sub_configs:
        part: Any = getattr(small, name, None)
        if part is not text and hasattr(part, "num_hidden_layers"):  # `part` configures an encoder of images or sounds.
            part.num_hidden_layers = 1
    return small


def _layers_of_every_kind(config: PretrainedConfig) -> int:
    """Return the smallest number n, at least two, such that the decoder's first n layers include every kind of its layers."""
    count = int(config.get_text_config().num_hidden_layers)
    with torch.device("meta"):
        decoder = decoder_of(_build(config))
    stacks = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    firsts = [0]
    for stack in stacks:
        kinds = [_kind(layer) for layer in stack]
        firsts += [kinds.index(kind) for kind in kinds]
    return min(count, max(2, max(firsts) + 1)) if stacks else count


def _kind(layer: nn.Module) -> str:
    """Describe a layer's modules and settings without its number, so that layers of the same kind have equal texts."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and not key.startswith("_") and "layer" not in key
        }
        shapes = [(key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__name__, sorted(settings.items()), shapes))
    return repr(parts)


def _with_short_windows(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same config, but with attention windows and similar lengths that the short test rows exceed.

    Such lengths are taken to be the config's numbers above ``WINDOW`` that can be changed without changing a tensor's shape.
    """
    config = copy.deepcopy(lm.config)
    config._attn_implementation = None
    shapes = _shapes(config)

    def fields(settings: Json) -> Iterator[tuple[Json, str]]:
        for name, value in settings.items():
            if isinstance(value, dict):
                yield from fields(value)
            elif type(value) is int and value > WINDOW and not name.endswith("_token_id"):
                yield settings, name

    for settings, name in list(fields(vars(config.get_text_config()))):
        value, settings[name] = settings[name], WINDOW
        try:
            changed = _random_model(config) if _shapes(config) == shapes else None
        except Exception:  # The model does not allow the short window: keep the original value.
            changed = None
        lm, settings[name] = (lm, value) if changed is None else (changed, WINDOW)
    return lm


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        lm = _build(config)
    return {name: tuple(tensor.shape) for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]}


def _randomise(lm: PreTrainedModel) -> None:
    """Set all learned tensors, including biases, sinks and corrections of routers, to random values that change the outputs."""
    generator = torch.Generator().manual_seed(0)
    for tensor in stored_tensors(lm).values():
        # Buffers without a dimension or with several are not learned: they are computed from the config.
        if tensor.is_floating_point() and (tensor.ndim == 1 or isinstance(tensor, nn.Parameter)):
            count = tensor.numel()
            noise = torch.randn(min(count, 2**20 + 1), generator=generator)
            noise = noise.repeat(-(-count // len(noise)))[:count].view(tensor.shape)
            # Noise replaces matrices, but is added to the initial values of vectors, such as scales of norms.
            tensor.copy_(noise * (_GAIN / tensor.shape[-1] ** 0.5) if tensor.ndim > 1 else tensor + 0.3 * noise)


_MAX_CPU_TOKENS = 4096
"""Maximum number of nodes in a pack of trees on a CPU. Larger packs exceed the CPU's caches: with 16,384 nodes, the model of
the quickstart is a tenth slower."""
_TREE_TOKENS_PER_HIDDEN, _MIN_TREE_TOKENS = 2, 1024
"""With a dense mask, a pack has at most max(``_TREE_TOKENS_PER_HIDDEN`` · hidden size, ``_MIN_TREE_TOKENS``) nodes. With
larger packs, fewer nodes are computed twice and the model is called less often, but attention costs more per node."""


def pack_sequences(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> PackedSequences:
    """Pack sequences for a model in its layout (:func:`layout_of`): as prefix trees, padded rows or rows of equal length.

    Args:
        lm: a transformers causal language model.
        order: prefix order of the sequences.
        max_tokens: maximum number of inputs in a pack.
    """
    rows = layout_of(lm).rows
    return pack_rows(lm, rows, order, _pack_tokens(lm, max_tokens) if rows == "tree" else max_tokens)


def split_into_passes(lm: PreTrainedModel, order: PrefixOrder, max_tokens: int) -> list[Ints]:
    """Divide sequences into forward passes for training, in which the activations of a pass stay in memory until its backward pass.

    Args:
        lm: a transformers causal language model.
        order: prefix order of the sequences.
        max_tokens: maximum number of inputs in a pass, including repeated and padding inputs; a longer sequence gets its own pass.

    Returns:
        Indices of the sequences of each pass.
    """
    if (rows := layout_of(lm).rows) != "tree":
        # Each pass is one pack. If sequences contain teacher contexts, the sequences of the same rows without them also fit.
        return [members for members, _ in order.padded_packs(max_tokens, mixed=rows == "padded")]
    passes: list[Ints] = []
    num_inputs = 0
    for cut, size in order.packs(_pack_tokens(lm, max_tokens), block_size(lm)):
        members = order.order[cut]
        if passes and num_inputs + size <= max_tokens:
            passes[-1] = np.concatenate((passes[-1], members))
            num_inputs += size
        else:
            passes.append(members)
            num_inputs = size
    return passes


def _pack_tokens(lm: PreTrainedModel, max_tokens: int) -> int:
    """Return the maximum number of nodes in a pack of trees: up to ``max_tokens``, if possible in whole blocks of attention."""
    if not accepts_blocks(lm):
        # Per node, matrix products cost O(hidden_size²), and dense attention costs O(hidden_size · nodes of the pack).
        hidden_size = int(lm.config.get_text_config().hidden_size)
        return min(max_tokens, max(_MIN_TREE_TOKENS, _TREE_TOKENS_PER_HIDDEN * hidden_size))
    limit = max_tokens if lm.device.type == "cuda" else min(max_tokens, _MAX_CPU_TOKENS)
    return limit - limit % block_size(lm) or limit


@torch.no_grad()
def score_views(
    lm: PreTrainedModel, views: Mapping[str, Sequence[ScoredSequence]], *, max_tokens: int
) -> tuple[dict[str, torch.Tensor], PackedSequences | None]:
    """Compute, without gradient, log-probabilities of responses in several versions of their prompts, which share prefixes.

    Args:
        lm: a transformers causal language model.
        views: the same turns in several versions, such as with and without teacher context, by the version's name.
        max_tokens: maximum number of input tokens in one forward pass.

    Returns:
        Log-probabilities ``[T]`` by the version's name, in row order, on the model's device; and the packed sequences that
        were scored, ``None`` if there are no turns.
    """
    sequences = [sequence for view in views.values() for sequence in view]
    if not sequences:
        return {name: torch.empty(0, device=lm.device) for name in views}, None
    packed = pack_sequences(lm, PrefixOrder(sequences), max_tokens)
    logprobs = sequence_logprobs(lm, packed)
    return dict(zip(views, logprobs.chunk(len(views)), strict=True)), packed
