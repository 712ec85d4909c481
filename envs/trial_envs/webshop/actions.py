"""Parses an action string."""

from __future__ import annotations


def parse_action(text: str) -> tuple[str, str]:
    """The name and the lower-cased argument of ``name[argument]``; the text and an empty argument if it has another form.

    Only the first line is read, as far as its last ``]``. Of several opening brackets the last one that leaves an argument
    counts, as in the greedy pattern ``(.+)\\[(.+)\\]``. Takes linear time for every text.
    """
    line = text.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 0, max(end - 1, 0))
    if start < 1:
        return text, ""
    return line[:start], line[start + 1 : end].lower()
