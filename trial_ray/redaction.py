"""Values that are secret are not written anywhere: into configs, logs, reports, or to services that runs are logged to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
_NAME = r"(?:token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|auth)"
SECRET = re.compile(rf"(?i)(^|[_.-]){_NAME}$")
"""Names of values that are not written; ``max_prompt_tokens`` is none of them."""
LEAST_SECRET = 8
"""Characters from which the value of a secret environment variable is looked for in texts."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_ASSIGNED = re.compile(rf"(?i)(?<![a-z])({_NAME}['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s'\",;)}}\]]+)")


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with :data:`HIDDEN` for values that are secret by their name, and wherever a secret of the environment occurs."""
    return {str(name): _cleaned(name, value) for name, value in settings.items()}


def _cleaned(name: object, value: Any) -> Any:
    if SECRET.search(str(name)) and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_cleaned("", inner) for inner in value]
    return _without_known(value) if isinstance(value, str) else value


def redacted(text: str, *, code: bool = False) -> str:
    """Text, such as a command line or a traceback, with :data:`HIDDEN` for what looks like a secret in it.

    Args:
        text: any.
        code: whether it is Python, which goes on being that: of what is assigned, only strings are replaced.
    """

    def hide(found: re.Match[str]) -> str:
        quote = found[2][0] if found[2][0] in "'\"" else ""
        return found[0] if code and not quote else f"{found[1]}{quote}{HIDDEN}{quote}"

    return _ASSIGNED.sub(hide, _without_known(text))


def _without_known(text: str) -> str:
    for name, secret in os.environ.items():
        if SECRET.search(name) and len(secret) >= LEAST_SECRET:
            text = text.replace(secret, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)
