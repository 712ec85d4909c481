"""Typed overrides of an algorithm config from the command line: ``--set key=value``."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import typing
from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trial_ray.environments.entry import find_spec, keyword_arguments
from trial_ray.errors import ConfigError
from trial_ray.settings import PLAIN_TYPES, did_you_mean, fields_of, is_search, plain_types, plain_types_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from trial_ray.algorithms.grpo_config import GRPOConfig

Settings = typing.TypeVar("Settings", bound="DataclassInstance")
NoneType = type(None)
OPTIONAL_IN_RLLIB = frozenset({"grad_clip", "seed", "evaluation_interval", "sample_timeout_s"})
WORDS = {"true": True, "false": False, "none": None, "null": None}


def split_assignment(assignment: str) -> tuple[str, str]:
    """Split ``key=value`` at the first equals sign.

    Raises:
        ConfigError: there is none, or the key is empty.
    """
    key, separator, text = assignment.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"Expected --set key=value; found {assignment!r}.")
    return key.strip(), text.strip()


def apply_overrides(config: GRPOConfig, assignments: Iterable[str]) -> GRPOConfig:
    """Return a copy of ``config`` with every ``key=value`` set.

    A dotted key reaches into a setting that is a dict (``env_config.split=valid_seen``). Values are Python or JSON
    literals, or bare words for strings; their type must be that of the setting, where an int also serves as a float.

    Raises:
        ConfigError: the key is unknown (the message names the nearest known one) or the value has another type.
    """
    changed: GRPOConfig = config.copy(copy_frozen=False)
    defaults = vars(type(config)())
    for assignment in assignments:
        key, text = split_assignment(assignment)
        name, *path = key.split(".")
        known = settable_names(defaults)
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
            setattr(changed, name, parse_value(key, text, _accepted_types(type(config), name, current, defaults[name])))
    return changed


def environment_overrides(env_id: str, assignments: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments of an environment out of ``env_config.key=value`` alone; no other setting may be named.

    Raises:
        ConfigError: another setting is named, or the environment does not take that keyword.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, text = split_assignment(assignment)
        first, *path = key.split(".")
        if first != "env_config" or not path:
            raise ConfigError(f"Only env_config.KEY=VALUE can be set here; found {key!r}.")
        values = _set_nested(values, first, path, text, environment_keywords(env_id))
    return values


def override_dataclass(settings: Settings, assignments: Iterable[str]) -> Settings:
    """Return a copy of a frozen dataclass with every ``field=value`` (or ``field.key=value``) set.

    Raises:
        ConfigError: as for :func:`apply_overrides`, or what the dataclass itself finds wrong.
    """
    hints = typing.get_type_hints(type(settings))
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, text = split_assignment(assignment)
        name, *path = key.split(".")
        if name not in hints:
            raise unknown_key(name, hints)
        if path:
            current = changes.get(name, getattr(settings, name))
            changes[name] = _set_nested(current and dict(current), name, path, text, ())
        else:
            changes[name] = parse_value(key, text, plain_types_of(hints[name]))
    return dataclasses.replace(settings, **changes)


def settable_names(settings: Mapping[str, Any]) -> list[str]:
    """Names of the settings that a value from the command line can replace."""
    return [name for name, value in settings.items() if not name.startswith("_") and type(value) in PLAIN_TYPES]


def is_of_setting(config_class: type, name: str, value: Any) -> bool:
    """Whether a value has a type that a setting of this package takes; RLlib does not declare its own reliably."""
    if name == "env":
        return value is None or isinstance(value, str)
    accepted = plain_types(config_class, name) if name in fields_of(config_class) else frozenset()
    kinds = {type(value)} | ({float} if type(value) is int else set()) | ({tuple} if type(value) is list else set())
    return not accepted or bool(accepted & kinds)


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist, naming the nearest one that does."""
    return ConfigError(f"Unknown setting {name!r}.{did_you_mean(name, known)}")


def parse_value(key: str, text: str, accepted: Collection[type]) -> Any:
    """Read ``text`` as one of the ``accepted`` types; with none given, as the literal it looks like, else as a string.

    Raises:
        ConfigError: it is none of them.
    """
    value = _literal(text)
    if not accepted or type(value) in accepted:
        return value
    if type(value) is int and float in accepted:
        return float(value)
    if isinstance(value, list | tuple) and (list in accepted or tuple in accepted):
        return tuple(value) if tuple in accepted else list(value)
    if str in accepted:
        return text
    names = " or ".join(sorted(kind.__name__.replace("NoneType", "None") for kind in accepted))
    raise ConfigError(f"{key} expects {names}; found {text!r}.")


def _literal(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _set_nested(values: Any, name: str, path: list[str], text: str, known: Collection[str]) -> dict[str, Any]:
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
    return {**values, key: parse_value(full, text, kinds if NoneType not in kinds and kinds <= PLAIN_TYPES else set())}


def _known_keys(config: GRPOConfig, name: str) -> Collection[str]:
    """Keys that a dict setting may hold; empty where only what it is passed to can tell."""
    if name in ("env_config", "panel_env_config"):
        return environment_keywords(config.env) if isinstance(config.env, str) and not config.environments else ()
    return getattr(config, name) or ()


def _accepted_types(config_class: type, name: str, current: Any, default: Any) -> frozenset[type]:
    seen = frozenset(type(value) for value in (current, default) if not is_search(value)) & PLAIN_TYPES
    declared = plain_types(config_class, name) if name in fields_of(config_class) else _types_in_rllib(name)
    accepted = declared or seen
    if name.startswith(("num_cpus_", "num_gpus_")):
        accepted |= {int, float}  # Ray takes fractions where RLlib declares whole numbers
    return frozenset() if accepted == {NoneType} else accepted


@functools.cache
def _types_in_rllib(name: str) -> frozenset[type]:
    """Types that RLlib's fluent methods declare for one of its own settings; empty where they declare none."""
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    for method in vars(AlgorithmConfig).values():
        if not inspect.isfunction(method) or method.__name__.startswith("_"):
            continue
        parameter = inspect.signature(method).parameters.get(name)
        if parameter is None or parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        # What RLlib imports for type checkers alone may be anything.
        names = ChainMap(method.__globals__, vars(builtins), defaultdict(lambda: Any))
        kinds = plain_types_of(typing.get_type_hints(method, localns=names).get(name, Any))
        # RLlib declares every keyword optional, even where its code cannot take None.
        return kinds if name in OPTIONAL_IN_RLLIB else kinds - {NoneType}
    return frozenset()


def environment_keywords(env_id: str) -> Collection[str]:
    """Keyword arguments of a registered environment, and its split; empty where anything may be passed."""
    try:
        known = keyword_arguments(find_spec(env_id))
    except ConfigError:
        return ()  # the environment itself is refused elsewhere, with a message of its own
    return () if known is None else {*known, "split"}
