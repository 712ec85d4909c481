"""Projection of a language model's response to the action that the environment receives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ResponseStyle = Literal["tagged", "plain"]

ACTION_OPEN, ACTION_CLOSE = (re.compile(tag, re.IGNORECASE | re.ASCII) for tag in ("<action>", "</action>"))
"""Tags around the action of a tagged response, in upper or lower case."""
# CJK ideographs (unified, extensions, compatibility). A tagged response that contains one is invalid.
_CJK = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]")


@dataclass(frozen=True, slots=True)
class Projection:
    """The action read from a response.

    Attributes:
        action: the argument of the environment's ``step``.
        valid: whether the response has the required format; the action may still be inadmissible.
        answer: text that the model gets instead of an observation if the response has no action; if ``answer`` is empty, the
            environment carries out ``action``.
        actions: the actions in order if the response has several actions, else empty.
        answers: for each of ``actions``, the text that the model gets instead of an observation; if it is empty, the
            environment carries out the action.
    """

    action: str
    valid: bool
    answer: str = ""
    actions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


def project_action(
    response: str, style: ResponseStyle = "tagged", tail: int = 30, keep_case: bool = False
) -> Projection:
    """Read the action from a response, which may be any text.

    ``"tagged"``: the lower-cased text between the first ``<action>`` and the first ``</action>``, stripped of white space.
    The response is valid if it also has ``<think>`` … ``</think>`` and no CJK ideograph. Without the pair of action tags
    the action is the last ``tail`` characters of the response, which is then invalid. Tags are case-insensitive.

    ``"plain"``: the whole response, stripped of white space, for small models that write only the action; valid unless
    empty.

    Args:
        response: decoded response, special tokens removed.
        style: response format that the prompt requested, ``"tagged"`` or ``"plain"``.
        keep_case: whether a ``"tagged"`` action keeps its upper-case letters, for case-sensitive environments.
        tail: number of last characters that become the action of a ``"tagged"`` response without action tags
            (verl-agent takes 30 for ALFWorld and 20 for WebShop).

    Raises:
        ValueError: unknown ``style``, or ``tail`` below 1.
    """
    if tail < 1:
        raise ValueError(f"tail must be at least 1 character, got {tail}")
    if style == "plain":
        action = response.strip()
        return Projection(action, bool(action))
    if style != "tagged":
        raise ValueError(f'style must be "tagged" or "plain", got {style!r}')
    lowered = response.lower()
    # Search the tags in the same text that the action is cut from, because lower-casing changes the length of a few characters.
    kept = response if keep_case else lowered
    start, end = (match.start() if (match := tag.search(kept)) else -1 for tag in (ACTION_OPEN, ACTION_CLOSE))
    if start < 0 or end < start:
        return Projection(kept[-tail:], False)
    action = kept[start + len("<action>") : end].strip()
    return Projection(action, _has_reasoning(lowered) and _CJK.search(response) is None)


def with_opening(response: str) -> str:
    """Prepend ``<think>`` to a response that has ``</think>`` without ``<think>`` before it.

    Chat templates of some reasoning models write ``<think>`` at the end of the prompt, so the response that a server or another
    library returns does not contain it.
    """
    opening, closing = (response.lower().find(tag) for tag in ("<think>", "</think>"))
    opened = closing >= 0 and not 0 <= opening < closing
    return f"<think>\n{response}" if opened else response


def _has_reasoning(lowered: str) -> bool:
    """Return whether a lower-cased response has ``<think>`` and, after it, ``</think>``."""
    start = lowered.find("<think>")
    return start >= 0 and lowered.find("</think>", start) >= 0
