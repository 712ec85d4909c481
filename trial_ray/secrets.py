"""Secrets: settings refer to environment variables instead of containing secrets, and files contain no values of secrets.

There is one rule. A value under a name that ends with token, secret, password, key, credentials or auth (``api_key``,
``HF_TOKEN``) is a secret unless it refers to an environment variable: ``${JUDGE_KEY}``.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from trial_ray.errors import ConfigError

HIDDEN = "<hidden>"
"""Replacement of a secret in texts and recorded settings."""
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Pattern of a reference to an environment variable, such as ``${JUDGE_KEY}``."""
MIN_LENGTH, MIN_REFERENCED_LENGTH = 8, 4
"""Minimum length of an environment variable's value that is hidden in texts; shorter values may be parts of words. The first
applies to variables with a secret's name, the second to variables that the settings refer to (``${JUDGE_KEY}``)."""
_NAME = r"(?<![a-z])(?:api|access|private)?(?:token|secret|password|passwd|key|credentials?|auth)"
_SECRET_NAME = re.compile(rf"(?i){_NAME}$")
NO_SECRETS = frozenset({"action_mask_key"})
"""Settings of RLlib whose names look like names of secrets."""
_ASSIGNED = re.compile(rf"(?i)({_NAME}['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s'\",;)}}\]]+)")
_LITERAL = re.compile(
    rf"(?i){_NAME}['\"]?\]?\s*(?:[=:]|:[^=\n]*=)[\s(]*[bfru]*(?P<quote>'''|\"\"\"|['\"])(?!\$\{{\w+\}}|(?P=quote))"
)
"""Pattern of Python code that assigns a string to the name of a secret."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_referenced: set[str] = set()
"""Names of the environment variables to which settings in this process have referred."""


def secret(variable: str) -> str:
    """Return a reference to an environment variable; its value is read in the process that creates the environment.

    An example is ``env_config={"api_key": secret("JUDGE_KEY")}``. The text ``${JUDGE_KEY}``, in a file or after ``--set``, is an
    equivalent reference. The variable must be set for the driver and wherever env runners start: a local Ray passes on the
    driver's environment, but the nodes of a cluster have their own environments (docs/reliability.md#secrets).

    Args:
        variable: name of the environment variable.

    Returns:
        The reference, which appears in place of the value in every file and message.

    Raises:
        ConfigError: ``variable`` is not a valid name of an environment variable.
    """
    reference = f"${{{variable}}}"
    if not isinstance(variable, str) or not REFERENCE.fullmatch(reference):
        raise ConfigError(
            "secret() expects the name of an environment variable (letters, digits and underscores), and got another value. Put "
            'the value into a variable, and give its name: secret("NAME").'
        )
    _referenced.add(variable)
    return reference


def is_secret_name(name: object) -> bool:
    """Return True if a value with this name is a secret, unless it refers to an environment variable."""
    return bool(_SECRET_NAME.search(str(name))) and name not in NO_SECRETS


def with_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the values of environment variables in place of references; the result must never be stored.

    Raises:
        ConfigError: a variable is not set in this process.
    """
    return {name: _with_value(name, value) for name, value in settings.items()}


def _with_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_value(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_value(name, inner) for inner in value)
    if not isinstance(value, str) or not (reference := REFERENCE.fullmatch(value)):
        return value
    variable = reference[1]
    _referenced.add(variable)
    if variable not in os.environ:
        raise ConfigError(
            f"{name} is the environment variable {variable}, which is not set on {socket.gethostname()}. Set it for the driver "
            "and wherever env runners start."
        )
    return os.environ[variable]


def refuse_plain_secrets(name: str, value: Any, *, is_secret: bool = False) -> None:
    """Reject secrets in a setting: checkpoints and Ray Tune would write them into files.

    Args:
        name: name of the setting, or dotted path of a value inside a setting.
        value: value of the setting, which may contain other values.
        is_secret: whether the value, or a dict that contains it, has a secret's name.

    Raises:
        ConfigError: a secret is not a reference to an environment variable, see :func:`secret`; the message names the setting,
            never the value.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_plain_secrets(f"{name}.{key}", inner, is_secret=is_secret or is_secret_name(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_plain_secrets(name, inner, is_secret=is_secret)
    elif is_secret and value != HIDDEN and not _is_harmless(value):
        variable = re.sub(r"\W", "_", name.rpartition(".")[2]).upper()
        raise ConfigError(
            f"{name} looks like a secret, and checkpoints and sweeps would write its value into files. Put it into an environment "
            f'variable and name that: secret("{variable}") in Python (from trial_ray import secret), or --set '
            f"'{name}=${{{variable}}}'."
        )


def _is_harmless(value: Any) -> bool:
    """Return True if a value with a secret's name is a reference, a bool, empty or ``None``."""
    if isinstance(value, str):
        return not value or bool(REFERENCE.fullmatch(value))
    return value is None or isinstance(value, bool)


# -- texts and records ---------------------------------------------------------------------------------------------------


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with :data:`HIDDEN` in place of secrets, and of values of secret environment variables inside texts."""
    return {str(name): _hidden(name, value) for name, value in settings.items()}


def _hidden(name: object, value: Any) -> Any:
    if is_secret_name(name) and not _is_harmless(value):
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_hidden("", inner) for inner in value]
    return _without_known(value) if isinstance(value, str) else value


def redacted(text: str) -> str:
    """Replace apparent secrets in text, such as a command line or a traceback, with :data:`HIDDEN`."""

    def hide(assigned: re.Match[str]) -> str:
        quote = assigned[2][0] if assigned[2][0] in "'\"" else ""
        refers = REFERENCE.match(assigned.string, assigned.start(2) + len(quote))
        flag = assigned[2].lower() in ("true", "false", "none")
        return assigned[0] if refers or flag else f"{assigned[1]}{quote}{HIDDEN}{quote}"

    return _ASSIGNED.sub(hide, _without_known(text))


def contains_secret(code: str) -> bool:
    """Return True if Python code contains a secret as a literal, or the value of a secret environment variable."""
    return bool(_LITERAL.search(code)) or _without_known(code) != code


def _without_known(text: str) -> str:
    """Return the text without values of secret environment variables and without passwords in addresses."""
    for name, value in os.environ.items():
        min_length = MIN_REFERENCED_LENGTH if name in _referenced else MIN_LENGTH
        if (is_secret_name(name) or name in _referenced) and len(value) >= min_length:
            text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)
