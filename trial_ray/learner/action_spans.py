"""Which tokens of a reply spell the action: those between its first ``<action>`` and ``</action>``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_OPEN, _CLOSE = re.compile("<action>", re.IGNORECASE), re.compile("</action>", re.IGNORECASE)


def action_mask(replies: Sequence[np.ndarray], tokenizer: Any) -> torch.Tensor:
    """Mask of the action's tokens in replies laid end to end, bool ``[T]``.

    A token counts when any of its characters lies between the tags; a reply without the pair of tags has none.

    Args:
        replies: int ``[y]`` each.
        tokenizer: the policy's tokenizer.
    """
    masks = []
    for ids in replies:
        mask = np.zeros(len(ids), bool)
        text = tokenizer.decode(ids)
        opening, closing = _OPEN.search(text), _CLOSE.search(text)
        if opening and closing and opening.end() < closing.start():
            first = _tokens_within(ids, opening.end(), tokenizer)
            last = _tokens_within(ids, closing.start() - 1, tokenizer)
            mask[first : last + 1] = True
        masks.append(mask)
    return torch.from_numpy(np.concatenate(masks))


def _tokens_within(ids: np.ndarray, characters: int, tokenizer: Any) -> int:
    """How many leading tokens spell at most ``characters`` characters: the place of the token that spells the next."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.decode(ids[:middle])) <= characters:
            low = middle
        else:
            high = middle - 1
    return low
