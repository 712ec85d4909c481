"""Reading an action text."""

from __future__ import annotations


def parse_action(text: str) -> tuple[str, str]:
    """The name and the lower-cased argument of ``name[argument]``; an empty argument if the text has no such form.

    The form may be followed by anything, must stand on the first line, and of several opening brackets the last one
    that leaves an argument counts, as a greedy ``(.+)\\[(.+)\\]`` has it. Scans the text twice whatever it holds.
    """
    line = text.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 0, max(end - 1, 0))
    if start < 1:
        return text, ""
    return line[:start], line[start + 1 : end].lower()
