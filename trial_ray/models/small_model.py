"""A small random model of a config: what a measurement of an architecture costs must not grow with the model.

It has few layers, every kind among them, and narrow ones; its attention windows are shorter than the rows of a measurement.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from trial_ray.errors import first_line
from trial_ray.models.sharding import decoder_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 64
LONGEST = 24
"""Tokens of the longest compared row."""
WINDOW = 8
"""What attention windows, chunks and original context lengths become, so that short rows exceed them."""
_NARROW, _HEAD = 64, 8
"""Least hidden size, as a whole and for each attention head, to which models are narrowed."""
_MOST_PARAMETERS = 2**29
_GAIN = 1.5
"""Scale of random matrices, beyond what keeps the size of activations: caps and sinks of attention must show."""


def built(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
    """A float32 model of a config, which is not changed; ``settings`` go to ``from_config``."""
    from transformers import AutoModelForCausalLM

    lm: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False, **settings
    )
    lm.eval()
    return lm


def small_model(config: PretrainedConfig) -> PreTrainedModel | str:
    """A random model of the smallest config of this kind that transformers can build and run; or why there is none."""
    failures: list[str] = []
    for small in _tried(_small_configs(config), failures):
        try:
            if (size := sum(math.prod(shape) for shape in _shapes(small).values())) > _MOST_PARAMETERS:
                failures.append(f"{size:,} parameters are too many for a comparison")
            elif (lm := _running(small)) is not None:
                return _with_short_windows(lm)
            else:
                failures.append("logits are not finite")
        except Exception as error:  # of transformers' code; said by the caller
            failures.append(f"{type(error).__name__}: {first_line(error)}")
    return failures[-1]


def _tried(configs: Iterator[PretrainedConfig], failures: list[str]) -> Iterator[PretrainedConfig]:
    """The configs, up to one that cannot be made."""
    try:
        yield from configs
    except Exception as error:  # of transformers' code; said by the caller
        failures.append(f"{type(error).__name__}: {first_line(error)}")


def _running(config: PretrainedConfig) -> PreTrainedModel | None:
    """A random model with plain attention, if it gives finite logits."""
    lm = built(config, attn_implementation="eager")
    _randomise(lm)
    ids = torch.arange(LONGEST)[None] % config.get_text_config().vocab_size
    return lm if bool(lm(input_ids=ids, use_cache=False).logits.isfinite().all()) else None


def _small_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Configs of few layers, every kind among them, and narrow ones first; at last the config itself."""
    text = config.get_text_config()
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    # Heads whose size no setting gives share the hidden size.
    heads = 1 if vars(text).get("head_dim") else int(getattr(text, "num_attention_heads", None) or 1)
    factor = 2 ** min(4, int(math.log2(max(1, hidden // max(_NARROW, _HEAD * heads)))))
    for count in dict.fromkeys((_layers_of_every_kind(config), layers)):
        shallow = _shallow(config, min(VOCABULARY, text.vocab_size), count)
        # Of widths whose product is another width only one may be divided; sums want all of them divided.
        for least in (_NARROW + 1, _NARROW, _NARROW // 2) if factor > 1 else ():
            yield _divided(shallow, factor, least)
        yield shallow
    yield copy.deepcopy(config)


def _shallow(config: PretrainedConfig, vocabulary: int, count: int) -> PretrainedConfig:
    """The config with fewer tokens and layers."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:count])
        elif name.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
            setattr(text, name, 0)
    text.vocab_size, text.num_hidden_layers = vocabulary, count
    for name in cast("dict[str, Any]", small.sub_configs):
        part: Any = getattr(small, name, None)
        if part is not text and hasattr(part, "num_hidden_layers"):  # of images and sounds
            part.num_hidden_layers = 1
    return small


def _divided(config: PretrainedConfig, factor: int, least: int) -> PretrainedConfig:
    """The config with numbers of at least ``least`` divided by the factor."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kept = {"vocab_size", "num_hidden_layers"}
    for name, value in list(vars(text).items()):
        if type(value) is int and value >= least and name not in kept and not name.endswith("_token_id"):
            setattr(text, name, value // factor)
    return small


def _layers_of_every_kind(config: PretrainedConfig) -> int:
    """The fewest first layers among which all kinds of the decoder's layers are, at least two."""
    count = int(config.get_text_config().num_hidden_layers)
    with torch.device("meta"):
        decoder = decoder_of(built(config))
    stacks = [each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    firsts = [0]
    for stack in stacks:
        kinds = [_kind(layer) for layer in stack]
        firsts += [kinds.index(kind) for kind in kinds]
    return min(count, max(2, max(firsts) + 1)) if stacks else count


def _kind(layer: nn.Module) -> str:
    """What a layer is made of, its settings included, its number left out."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and not key.startswith("_") and "layer" not in key
        }
        shapes = [(key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False)]
        parts.append((name, type(module).__name__, sorted(settings.items()), shapes))
    return repr(parts)


def _with_short_windows(lm: PreTrainedModel) -> PreTrainedModel:
    """The model with attention windows, chunks and original context lengths so small that short rows exceed them.

    They are the larger numbers of a config that change no tensor's shape.
    """
    config = copy.deepcopy(lm.config)
    config._attn_implementation = None
    shapes = _shapes(config)

    def fields(settings: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        for name, value in settings.items():
            if isinstance(value, dict):
                yield from fields(value)
            elif type(value) is int and value > WINDOW and not name.endswith("_token_id"):
                yield settings, name

    for settings, name in list(fields(vars(config.get_text_config()))):
        value, settings[name] = settings[name], WINDOW
        try:
            changed = _running(config) if _shapes(config) == shapes else None
        except Exception:  # a value that the model does not allow is left as it is
            changed = None
        lm, settings[name] = (lm, value) if changed is None else (changed, WINDOW)
    return lm


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        lm = built(config)
    return {name: tuple(each.shape) for name, each in [*lm.named_parameters(), *lm.named_buffers()]}


def _randomise(lm: PreTrainedModel) -> None:
    """Random values for all that is learned, biases, sinks and corrections of routers included, so that each matters."""
    generator = torch.Generator().manual_seed(0)
    unstored = {id(buffer) for _, buffer in lm.named_non_persistent_buffers()}
    learned_buffers = [each for each in lm.buffers() if each.ndim == 1 and id(each) not in unstored]
    for tensor in (*lm.parameters(), *learned_buffers):
        if tensor.is_floating_point():
            count = tensor.numel()
            noise = torch.randn(min(count, 2**20 + 1), generator=generator)
            noise = noise.repeat(-(-count // len(noise)))[:count].view(tensor.shape)
            # Vectors keep what they are centred on: scales of norms, decay rates.
            tensor.copy_(noise * (_GAIN / tensor.shape[-1] ** 0.5) if tensor.ndim > 1 else tensor + 0.3 * noise)
