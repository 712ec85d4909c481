"""Experiment files: Python that defines ``config`` and ``stop``, in the style of RLlib's tuned examples.

``--set key=value`` on the command line overrides a setting of the file. The package's own experiment files are in the folder
``tuned_examples``, which is at the top of a clone and inside the installed package.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import math
import os
import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from trial_ray.config.declare import (
    PLAIN_TYPES,
    did_you_mean,
    fields_of,
    is_finite,
    is_search,
    may_be_infinite,
    plain_types,
    plain_types_of,
)
from trial_ray.errors import ConfigError, UserInputError
from trial_ray.files import Json, Numbers, Record, examples_folder
from trial_ray.trust import ENGINE
from trial_ray.user_files import run_user_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from trial_ray.algorithms.grpo import GRPOConfig


@dataclass(frozen=True)
class Experiment:
    """Contents of an experiment file.

    Attributes:
        path: the file.
        config: the config of the algorithm.
        stop: values by metric (``/``-joined result key); training ends as soon as one metric reaches its value.
        names: all names that the file defines, such as ``config``, ``stop`` and a sweep's ``metric`` and ``mode``.
    """

    path: Path
    config: GRPOConfig
    stop: Numbers
    names: Json


def experiment_file(name: str) -> Path:
    """Return the file for ``name``: a path, or the name of a tuned example (``alfworld_quickstart``).

    An existing file takes precedence. If there is neither a file nor an example, the path is returned, and
    :func:`load_experiment` rejects it.
    """
    path, example = Path(name), examples_folder() / f"{name}.py"
    # Use os.path.isfile: Path.is_file raises an error if the name is too long.
    return example if not os.path.isfile(path) and not path.is_absolute() and os.path.isfile(example) else path


def _nearest_experiment(path: Path) -> str | None:
    """Return the tuned example or the file next to ``path`` with the most similar name; ``None`` if no name is similar."""
    examples = examples_folder()
    files = [*examples.glob("*.py"), *examples.glob("sweeps/*.py")]
    known = {file.stem: file.relative_to(examples).with_suffix("").as_posix() for file in files}
    known |= {file.stem: str(file) for file in path.parent.glob("*.py") if file.is_file()}
    nearest = difflib.get_close_matches(path.name.removesuffix(".py"), known, n=1)
    return known[nearest[0]] if nearest else None


def load_experiment(path: Path | str) -> Experiment:
    """Run an experiment file and check the ``config`` and ``stop`` that it defines.

    Raises:
        UserInputError: the file is missing, fails, or defines no ``config``.
        ConfigError: ``stop`` is not a dict of finite numbers.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        nearest = _nearest_experiment(path)
        advice = f"Did you mean {nearest}?" if nearest else "Name a Python file that defines `config` and `stop`."
        raise UserInputError(f"{path} is neither a file nor a tuned example. {advice}")
    names = run_user_file(path, "trial_ray_experiment")
    config: Any = names.get("config")
    stop = names.get("stop", {})
    if not hasattr(config, "environment_entries"):
        raise UserInputError(
            f"{path} must define `config`, a GRPOConfig or a config derived from it, got {type(config).__name__}."
        )
    if not isinstance(stop, dict) or not all(map(is_finite, stop.values())):
        raise ConfigError(
            f'{path} must define `stop` as a dict of finite numbers, such as {{"training_iteration": 20}}.'
        )
    return Experiment(path, config, stop, names)


def reached(stop: Numbers, metrics: Numbers) -> bool:
    """Return True if a metric has reached its value in ``stop``; metrics that are not reported yet are ignored."""
    return any(name in metrics and metrics[name] >= value for name, value in stop.items())


Settings = typing.TypeVar("Settings", bound="DataclassInstance")
WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Constants of JSON and Python, by name in lower case; upper-case letters are accepted too."""
NOT_FINITE = frozenset({"inf", "infinity", "nan"})


def _assignments(assignments: Iterable[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield the name, the list of keys and the text of the value of each ``name.key=value``.

    Raises:
        ConfigError: there is no equals sign, or the key is empty.
    """
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"Expected --set key=value, got {assignment!r}.")
        name, *path = key.strip().split(".")
        yield name, path, text.strip()


def apply_overrides(config: GRPOConfig, assignments: Iterable[str]) -> GRPOConfig:
    """Return a copy of ``config`` with every ``key=value`` set.

    A dotted key refers to an entry of a setting that is a dict (``env_config.split=valid_seen``). Values are JSON or Python
    literals; a string needs no quotes. A value must have the setting's type; an int is also accepted for a float.

    Raises:
        ConfigError: the key is unknown (the message names the nearest known key), or the value has another type or is not finite.
    """
    changed: GRPOConfig = config.copy(copy_frozen=False)
    defaults = vars(type(config)())
    known = settable_names(defaults)
    for name, path, text in _assignments(assignments):
        if name not in known:
            raise unknown_key(name, known)
        if name == "env_config" and changed.environments:
            raise ConfigError(
                "The run plays several environments: set environments=[(id, keyword arguments, weight), ...]."
            )
        current = getattr(changed, name)
        if path:
            setattr(changed, name, _set_nested(current, name, path, text, _known_keys(changed, name)))
        else:
            present = {type(value) for value in (current, defaults[name]) if not is_search(value)} & PLAIN_TYPES
            accepted = set(plain_types(type(config), name) or present)
            if name.startswith(("num_cpus_", "num_gpus_")):
                accepted |= {int, float}  # Ray accepts fractional CPUs and GPUs, even if RLlib declares an int.
            if accepted == {NoneType}:
                accepted = set()  # The setting's type is unknown, so accept values of any type.
            setattr(changed, name, parse_value(name, text, accepted, may_be_infinite(type(config), name)))
    return changed


def override_dataclass(settings: Settings, assignments: Iterable[str]) -> Settings:
    """Return a copy of a frozen dataclass with every ``field=value`` (or ``field.key=value``) set.

    Raises:
        ConfigError: a field is unknown, or a value has another type, is not finite or is rejected by the dataclass.
    """
    hints = typing.get_type_hints(type(settings))
    changes: Json = {}
    for name, path, text in _assignments(assignments):
        if name not in hints:
            raise unknown_key(name, hints)
        if path:
            current = changes.get(name, getattr(settings, name))
            changes[name] = _set_nested(current and dict(current), name, path, text, ())
        else:
            changes[name] = parse_value(name, text, plain_types_of(hints[name]))
    return dataclasses.replace(settings, **changes)


def settable_names(settings: Record) -> list[str]:
    """Return the names of the settings that ``--set`` can replace: their values are numbers, strings, lists, dicts or ``None``."""
    return [name for name, value in settings.items() if not name.startswith("_") and type(value) in PLAIN_TYPES]


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key; its message names the nearest known key."""
    return ConfigError(f"Unknown setting {name!r}.{did_you_mean(name, known)}")


def parse_value(key: str, text: str, accepted: Collection[type], infinite: bool = False) -> Any:
    """Parse ``text`` as one of the ``accepted`` types.

    Args:
        key: name of the setting, for the message.
        text: JSON, a Python literal that may contain ``true``, ``false`` and ``null``, or a string without quotes.
        accepted: accepted types, such as ``int``; if empty, a literal of any type is accepted, and other text is a string.
        infinite: whether an infinite number is accepted.

    Raises:
        ConfigError: the value has another type, or contains a non-finite number or an object that JSON cannot represent.
    """
    value = _literal(text)
    if accepted and type(value) not in accepted:
        value = _converted(value, text, accepted)
        if value is None:
            names = " or ".join(sorted(kind.__name__.replace("NoneType", "None") for kind in accepted))
            raise ConfigError(f"{key} expects {names}, got {text!r}.")
    for part in _parts_of(value):
        if isinstance(part, float) and not math.isfinite(part) and not (infinite and math.isinf(part)):
            raise ConfigError(f"{key} expects a finite number, got {text!r}.")
        if type(part) not in PLAIN_TYPES:
            raise ConfigError(f"{key} expects numbers, texts, lists and dicts, got {text!r}.")
    return value


def _converted(value: Any, text: str, accepted: Collection[type]) -> Any:
    """Convert the value, which has none of the accepted types, to one of them; ``None`` if impossible."""
    if float in accepted and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if float in accepted and text.lower().lstrip("+-") in NOT_FINITE:
        return float(text)
    if isinstance(value, list | tuple) and (list in accepted or tuple in accepted):
        return tuple(value) if tuple in accepted else list(value)
    # Settings such as ``sharding`` accept the string "none", but not None.
    return text if str in accepted and (value is not None or text == "none") else None


def _literal(text: str) -> Any:
    """Parse text as JSON, else as a Python literal with JSON's constants allowed; if it is neither, return the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(_Words().visit(ast.parse(text, mode="eval")))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


class _Words(ast.NodeTransformer):
    """Replaces the names of JSON's and Python's constants by the constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant with this name; return ``node`` for any other name, which ``literal_eval`` then rejects."""
        return ast.Constant(WORDS[node.id.lower()]) if node.id.lower() in WORDS else node


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield the value and all values inside it."""
    yield value
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in inner:
        yield from _parts_of(part)


def _set_nested(values: Any, name: str, path: list[str], text: str, known: Collection[str]) -> Json:
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is not a dict ({values!r}), so {'.'.join([name, *path])} cannot be set.")
    key, *rest = path
    full = f"{name}.{key}"
    if known and key not in values and key not in known:
        raise unknown_key(full, [f"{name}.{other}" for other in {*values, *known}])
    if rest:
        inner = values.get(key, {})
        return {**values, key: _set_nested(inner, full, rest, text, inner)}
    current = values.get(key)
    choices = [current] if not is_search(current) else current["grid_search"] if isinstance(current, dict) else []
    kinds = {type(value) for value in choices}
    typed = kinds and NoneType not in kinds and kinds <= PLAIN_TYPES
    # Accept the type of the current value, because the entry's declared type is unknown; also accept None, as most entries do.
    return {**values, key: parse_value(full, text, kinds | {NoneType} if typed else set())}


def _known_keys(config: GRPOConfig, name: str) -> Collection[str]:
    """Return the keys that a dict setting may have; empty if they are unknown."""
    if name in ("env_config", "evaluation_env_config"):
        from trial_ray.adapters.registry import find_spec, keyword_arguments

        try:
            known = keyword_arguments(find_spec(str(config.env))) if not config.environments else None
        except ConfigError:
            known = None  # The environment is unknown; the config's validation will report it.
        return () if known is None else {*known, "split"}
    if name == "engine_kwargs" and config.engine_kwargs:
        return {*ENGINE, *config.engine_kwargs}
    if name == "warm_start":
        from trial_ray.warmstart.settings import WarmStartSettings

        return fields_of(WarmStartSettings)
    return ()
