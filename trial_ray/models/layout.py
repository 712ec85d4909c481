"""How the rows of a model are laid out for its forward passes: measured once, against transformers' own attention.

Whether a mask makes any prefix tree of a model, whether rows of unequal length may share a pass, and which implementation of
attention computes what the model's own code says, no field of its config tells. A small model of the same config, with random
weights, is therefore scored in each of the layouts and compared with its own forward pass, one row after the other.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from trial_ray.errors import ConfigError, first_line
from trial_ray.models import tree_attention
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import PackedSequences, PrefixOrder, ScoredSequence, pack_padded, pack_trees
from trial_ray.models.small_model import LONGEST, VOCABULARY, WINDOW, built, small_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

Rows = Literal["tree", "padded", "one length"]
"""One prefix tree; rows padded on the right; or rows of one length in a pass, because a longer row changes what others give."""

TOLERANCE = 1e-3
"""Nats by which log-probabilities may differ. Rounding gives 1e-5 at most, the smallest errors known 1e-2."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is scored.

    Attributes:
        rows: what shares a forward pass.
        attention: ``attn_implementation`` with which the model is loaded.
        together, alone: largest difference from the model's own log-probabilities, in nats, of all rows in one call of the scorer
            and of one row a call.
    """

    rows: Rows
    attention: str
    together: float
    alone: float


def layout_of(lm: PreTrainedModel) -> Layout:
    """The layout of a loaded model, under the attention that it was loaded with.

    Raises:
        ConfigError: no layout gives the model's own log-probabilities.
    """
    found: Layout | None = vars(lm).get("_layout")
    if found is None:
        set_layout(lm, found := measured_layout(lm.config, lm.config._attn_implementation))
    return found


def set_layout(lm: PreTrainedModel, layout: Layout) -> None:
    """Keep the layout under which a model was loaded."""
    vars(lm)["_layout"] = layout


def measured_layout(config: PretrainedConfig, attention: str | None = None) -> Layout:
    """The cheapest layout of a model of this config that gives the model's own log-probabilities.

    Args:
        config: of a causal language model.
        attention: the only implementation to look at; ``None``: this package's, transformers' default and plain PyTorch.

    Raises:
        ConfigError: there is none.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None  # how an earlier model of it was loaded
    return _measured(_Key(config.to_json_string(use_diff=False), config), attention)


@dataclass(frozen=True, eq=False)
class _Key:
    """A config by its content."""

    text: str
    config: PretrainedConfig

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@cache
def _measured(key: _Key, attention: str | None) -> Layout:
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad(), _quiet():
        own = small_model(key.config)
        if isinstance(own, str):
            # The model's own forward pass of rows that need no padding, which is right wherever the model is causal.
            logger.warning(
                "%s: rows are scored one length at a time, because nothing can be measured: %s",
                key.config.model_type,
                own,
            )
            return Layout("one length", attention or _default_attention(key.config), math.nan, math.nan)
        rows = _rows(own.config.get_text_config().vocab_size)
        expected = _own_logprobs(own, rows)
        name = type(own).__name__
        failures: list[str] = []
        for kind, implementation in _candidates(key.config, attention):
            described = f"{'a prefix tree' if kind == 'tree' else f'{kind} rows'} with {implementation} attention"
            try:
                lm = _scored_model(own, implementation)
                alone = max(_difference(lm, kind, [row], value) for row, value in zip(rows, expected, strict=True))
                together = _difference(lm, kind, rows, torch.cat(expected))
            except Exception as error:  # any code of the model's may raise; it is said below
                failures.append(f"{described}: {type(error).__name__}: {first_line(error)}")
                continue
            if max(alone, together) <= TOLERANCE:
                if kind != "tree":
                    logger.warning("Rows of %s are padded, and shared prefixes computed again: %s", name, failures[0])
                return Layout(kind, implementation, together, alone)
            failures.append(f"{described}: rows together differ by {together:.2g} nats, alone by {alone:.2g}")
    raise ConfigError(
        f"{name} cannot be scored: its log-probabilities differ from transformers' own in every layout, expected at most "
        f"{TOLERANCE:g} nats. Found with a small random model of its config: {'; '.join(failures)}. Choose another model."
    )


def _own_logprobs(own: PreTrainedModel, rows: Sequence[ScoredSequence]) -> list[torch.Tensor]:
    """Log-probabilities of each row alone, by the model's own forward pass.

    Raises:
        ConfigError: they depend on what follows a token, or on the rows scored before.
    """

    def logprobs(row: ScoredSequence) -> torch.Tensor:
        logs: torch.Tensor = (
            own(input_ids=torch.from_numpy(row.inputs)[None], use_cache=False).logits[0].log_softmax(-1)
        )
        return logs.gather(-1, torch.from_numpy(row.ids)[1:, None])[:, 0]

    found = [logprobs(row) for row in rows]
    again = [logprobs(row) for row in rows[::-1]][::-1]
    # The first two rows differ in their last two tokens, of which one is an input; it predicts the last.
    for what, pairs in (
        ("another last token changes log-probabilities before it", [(found[0][:-2], found[1][:-2])]),
        ("a row's log-probabilities depend on the rows scored before it", list(zip(found, again, strict=True))),
    ):
        if not (change := max((one - other).abs().max().item() for one, other in pairs)) <= TOLERANCE:
            raise ConfigError(
                f"{type(own).__name__} cannot be scored: {what}, by {change:.2g} nats. Choose another model."
            )
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on the settings of the small model."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _candidates(config: PretrainedConfig, attention: str | None) -> Iterator[tuple[Rows, str]]:
    default = _default_attention(config)
    known = [tree_attention.register(), default] if attention is None else [attention]
    yield from (("tree", implementation) for implementation in known)
    # Without a tree this package's own attention is of no use.
    plain = [default, "eager"] if attention is None else [attention]
    yield from itertools.product(("padded",), dict.fromkeys(plain))
    yield from itertools.product(("one length",), dict.fromkeys(plain))


def pack_rows(lm: PreTrainedModel, rows: Rows, order: PrefixOrder, max_tokens: int) -> PackedSequences:
    """Lay sequences out for a model, at most ``max_tokens`` inputs a pack."""
    if rows == "tree":
        return pack_trees(order, max_tokens, lm.device, tree_attention.block_size(lm))
    return pack_padded(order, max_tokens, lm.device, mixed=rows == "padded")


def _difference(lm: PreTrainedModel, kind: Rows, rows: Sequence[ScoredSequence], expected: torch.Tensor) -> float:
    found, _ = sequence_logprobs(lm, pack_rows(lm, kind, PrefixOrder(rows), max_tokens=LONGEST * len(rows)))
    difference = (found - expected).abs().max().item()
    return difference if difference == difference else float("inf")


def _rows(vocabulary: int) -> list[ScoredSequence]:
    """Rows with a fork, another end, and of unequal length."""
    generator = np.random.default_rng(0)
    first, other = (
        generator.integers(min(WINDOW, vocabulary // 2), min(VOCABULARY, vocabulary), LONGEST) for _ in range(2)
    )
    changed = first.copy()
    changed[-2:] = other[-2:]
    fork = np.concatenate((first[:10], other[:7]))
    return [ScoredSequence(ids, len(ids) - 1) for ids in (first, changed, fork, other, other[::-1][:5].copy())]


def _default_attention(config: PretrainedConfig) -> str:
    with torch.device("meta"):
        return str(built(config).config._attn_implementation)


def _scored_model(own: PreTrainedModel, attention: str) -> PreTrainedModel:
    """The model as it is loaded for scoring, with the weights of ``own``."""
    lm = built(own.config, attn_implementation=attention)
    lm.load_state_dict(own.state_dict())
    return lm
