"""Secrets in settings: references to environment variables, without values in files."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from trial_ray.errors import ConfigError
from trial_ray.files import HIDDEN, NAMED, REFERENCE, SECRET

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def secret(variable: str) -> str:
    """Return a reference to an environment variable; its value is read in the process that creates the environment.

    For example, ``env_config={"api_key": secret("JUDGE_KEY")}``; in a file or after ``--set`` also as the text ``${JUDGE_KEY}``.
    The variable must be set for the driver and wherever env runners start: a local Ray passes on the driver's environment, a
    cluster's nodes have their own (docs/reliability.md#secrets).

    Args:
        variable: its name.

    Returns:
        The reference, which appears in place of the value in every file and message.

    Raises:
        ConfigError: ``variable`` is not a valid name of an environment variable.
    """
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
        raise ConfigError(
            "secret() was not given the name of an environment variable (letters, digits and underscores). Put the value into a "
            'variable, and give its name: secret("NAME").'
        )
    NAMED.add(variable)
    return f"${{{variable}}}"


def with_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace references in settings by the values of their variables; pass the result on, and never store it.

    Raises:
        ConfigError: a variable is not set here.
    """
    return {name: _value(name, each) for name, each in settings.items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _value(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_value(name, inner) for inner in value)
    if not isinstance(value, str) or not (named := REFERENCE.fullmatch(value)):
        return value
    NAMED.add(named[1])
    if (found := os.environ.get(named[1])) is None:
        raise ConfigError(
            f"{name} is the environment variable {named[1]}, which is not set on {socket.gethostname()}. Set it for the driver "
            "and wherever env runners start."
        )
    return found


def refuse_plain_secrets(name: str, value: Any) -> None:
    """Reject a plain value with a name that looks like a secret's: checkpoints and Ray Tune would write it into files.

    Args:
        name: name of the setting.
        value: value of the setting, which may contain other values.

    Raises:
        ConfigError: there is such a value; the message names the setting, never the value.
    """
    for path in _plain(name, value, False):
        variable = re.sub(r"\W", "_", path.rpartition(".")[2]).upper()
        raise ConfigError(
            f"{path} looks like a secret, and checkpoints and sweeps would write its value into files. Put it into an environment "
            f'variable and name that: secret("{variable}") in Python (from trial_ray import secret), or --set '
            f"'{path}=${{{variable}}}'."
        )


def _plain(path: str, value: Any, named: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _plain(f"{path}.{key}", inner, named or bool(SECRET.search(str(key))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _plain(path, inner, named)
    elif (
        named
        and not isinstance(value, bool)
        and value not in (None, "", HIDDEN)
        and not REFERENCE.fullmatch(str(value))
    ):
        yield path
