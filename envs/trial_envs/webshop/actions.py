"""Parses an action string."""

from __future__ import annotations


def parse_action(text: str) -> tuple[str, str]:
    """Return the name and lower-cased argument of ``name[argument]``; for any other text, the text and an empty argument.

    Only the first line is read, up to its last ``]``. If there are several opening brackets, the argument starts after
    the last bracket that leaves it non-empty, as in the greedy pattern ``(.+)\\[(.+)\\]``. Parsing takes linear time for every
    text.
    """
    line = text.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 0, max(end - 1, 0))
    if start < 1:
        return text, ""
    return line[:start], line[start + 1 : end].lower()
