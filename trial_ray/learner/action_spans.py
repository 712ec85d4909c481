"""Which tokens of a response spell the action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trial_ray.environments.templates import PromptStyle

# As the projection finds them: in any case, of ASCII letters.
_OPEN, _CLOSE = (re.compile(tag, re.IGNORECASE | re.ASCII) for tag in ("<action>", "</action>"))


def action_mask(responses: Sequence[np.ndarray], tokenizer: Any, style: PromptStyle = "tagged") -> torch.Tensor:
    """Mask of the action's tokens in responses laid end to end, bool ``[T]``.

    In a tagged response (those of a conversation are tagged, too) a token counts when any of its characters lies between the
    first ``<action>`` and the first ``</action>``, from where the projection reads the action; without that pair of tags none
    does. A plain response is the action, but for its special tokens.

    Args:
        responses: int ``[y]`` each.
        tokenizer: the policy's tokenizer.
        style: of the prompts, from which the form of the responses follows.
    """
    if style == "plain":
        masks = [~np.isin(ids, tokenizer.all_special_ids) for ids in responses]
    else:
        masks = [_between_tags(ids, tokenizer) for ids in responses]
    return torch.from_numpy(np.concatenate(masks))


def _between_tags(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    text = _decode(ids, tokenizer)
    opening, closing = _OPEN.search(text), _CLOSE.search(text)
    if opening and closing and opening.end() < closing.start():
        first = _tokens_within(ids, opening.end(), tokenizer)
        # The action's last character may share its token with the closing tag, or take several tokens.
        shared = _tokens_within(ids, closing.start() - 1, tokenizer) + 1
        mask[first : max(shared, _tokens_within(ids, closing.start(), tokenizer))] = True
    return mask


def _tokens_within(ids: np.ndarray, characters: int, tokenizer: Any) -> int:
    """How many leading tokens spell at most ``characters`` characters: the index of the token that spells the next."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_decode(ids[:middle], tokenizer)) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def _decode(ids: np.ndarray, tokenizer: Any) -> str:
    # Cleaning up would move blanks, and with them the positions of characters.
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text
