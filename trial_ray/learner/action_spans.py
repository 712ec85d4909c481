"""Tokens of the action in a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trial_envs.core.projection import ACTION_CLOSE, ACTION_OPEN
from trial_ray.adapters.templates import PromptStyle
from trial_ray.models.vocabulary import special_token_ids
from trial_ray.prompts.tool_calls import last_call, require_response_template


def action_mask(responses: Sequence[np.ndarray], tokenizer: Any, style: PromptStyle = "tagged") -> torch.Tensor:
    """Return the mask of the action's tokens in concatenated responses, bool ``[T]``.

    In a tagged response (also in a conversation), a token counts if any of its characters is between the first ``<action>`` and
    the first ``</action>``, from which the projection reads the action; without this pair of tags, no token counts. In a plain
    response, all tokens count except special tokens. In a response that calls tools, the tokens of the last call count, see
    :func:`~trial_ray.prompts.tool_calls.last_call`.

    Args:
        responses: int ``[y]`` each.
        tokenizer: the policy's tokenizer.
        style: style of the prompts, which determines the form of the responses.
    """
    if style == "plain":
        special = list(special_token_ids(tokenizer))
        masks = [~np.isin(ids, special) for ids in responses]
    elif style == "tools":
        require_response_template(tokenizer)
        masks = [last_call(tokenizer, ids) for ids in responses]
    else:
        masks = [_between_tags(ids, tokenizer) for ids in responses]
    return torch.from_numpy(np.concatenate([np.empty(0, bool), *masks]))


def _between_tags(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    text = _decode(ids, tokenizer)
    opening, closing = ACTION_OPEN.search(text), ACTION_CLOSE.search(text)
    if opening and closing and opening.end() < closing.start():
        first = _tokens_within(ids, opening.end(), tokenizer)
        # The action's last character may share its token with the closing tag, or consist of several tokens.
        shared = _tokens_within(ids, closing.start() - 1, tokenizer) + 1
        mask[first : max(shared, _tokens_within(ids, closing.start(), tokenizer))] = True
    return mask


def _tokens_within(ids: np.ndarray, characters: int, tokenizer: Any) -> int:
    """Return the number of leading tokens that spell at most ``characters`` characters, by bisection."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_decode(ids[:middle], tokenizer)) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def _decode(ids: np.ndarray, tokenizer: Any) -> str:
    # Cleaning up would remove blanks, which changes the positions of characters.
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text
