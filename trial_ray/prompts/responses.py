"""Text of responses, used to check their form and to read their action."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from trial_ray.models.vocabulary import special_token_ids, spell_unknown
from trial_ray.prompts.untrusted_text import REASONING_TAGS

# Chat templates of reasoning models may open the reasoning at the end of the prompt.
_OPENED = re.compile(r"<think>\s*\Z")


class ResponseTexts:
    """Decodes responses, with text that the prompt opened for them.

    A prompt may end in an opened ``<think>``, and the response then starts inside this element. The opening text belongs to
    the response when its form is checked or shown, and to the prompt in ids, masks and losses. An element that the prompt
    closes again, such as the empty ``<think>\\n\\n</think>`` of a disabled reasoning mode, was not opened for the response.

    Args:
        tokenizer: the policy's ``transformers`` tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        tags = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if str(token) in REASONING_TAGS}
        self._dropped = special_token_ids(tokenizer) - tags
        self._opened: dict[bytes, str] = {}

    def text(self, prompt_ids: np.ndarray, insert_at: int, response_ids: np.ndarray) -> str:
        """Decode a response with the text that its prompt opened for it, without special tokens except reasoning tags.

        Args:
            prompt_ids: int32 ``[P]``.
            insert_at: index in ``prompt_ids`` of the end of the user's message.
            response_ids: int ``[y]``; ids outside the tokenizer's vocabulary are spelled (:func:`spell_unknown`).
        """
        return self.opened(prompt_ids, insert_at) + self._spelled(response_ids, self._dropped)

    def reasoning_tokens(self, prompt_ids: np.ndarray, insert_at: int, response_ids: np.ndarray) -> int:
        """Return the number of reasoning tokens in a response, ``</think>`` included: all if it is not closed, 0 without reasoning.

        Arguments as in :meth:`text`.
        """
        # Decode only the first tokens: most turns have no reasoning, and this method is called in every turn.
        if not self.text(prompt_ids, insert_at, response_ids[:8]).lstrip().startswith("<think>"):
            return 0
        lengths = range(len(response_ids))
        return bisect_left(lengths, True, key=lambda length: "</think>" in self.whole(response_ids[:length]))

    def whole(self, response_ids: np.ndarray) -> str:
        """Decode a response with all its special tokens, without the text that its prompt opened; ids as in :meth:`text`."""
        return self._spelled(response_ids, frozenset())

    def _spelled(self, ids: np.ndarray, dropped: Collection[int]) -> str:
        texts, known = list[str](), list[int]()
        for token in ids.tolist():
            if not 0 <= token < self._size:
                texts += [self.decode(known), spell_unknown(token)]
                known = []
            elif token not in dropped:
                known.append(token)
        return "".join([*texts, self.decode(known)])

    def opened(self, prompt_ids: np.ndarray, insert_at: int) -> str:
        """Return the text at the end of a prompt that belongs to the response; arguments as in :meth:`text`."""
        behind = np.asarray(prompt_ids[insert_at:], np.int32)
        key = behind.tobytes()
        if key not in self._opened:
            match = _OPENED.search(self.decode(behind.tolist()))
            self._opened[key] = match[0] if match else ""
        return self._opened[key]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
