"""Typed overrides of an algorithm config from the command line: ``--set key=value``."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

Settings = typing.TypeVar("Settings")
NoneType = type(None)
PLAIN_TYPES = frozenset({bool, int, float, str, list, tuple, dict, NoneType})
OPTIONAL_IN_RLLIB = frozenset({"grad_clip", "seed", "evaluation_interval", "sample_timeout_s"})
# What stands for generic annotations; the words of a Literal are checked where they are used.
ORIGINS = {typing.Literal: str, Mapping: dict, Sequence: list}
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


def apply_overrides(config: AlgorithmConfig, assignments: Iterable[str]) -> AlgorithmConfig:
    """Return a copy of ``config`` with every ``key=value`` set.

    A dotted key reaches into a setting that is a dict (``env_config.split=valid_seen``). Values are Python or JSON
    literals, or bare words for strings; their type must be that of the setting, where an int also serves as a float.

    Raises:
        ConfigError: the key is unknown (the message names the nearest known one) or the value has another type.
    """
    changed = config.copy(copy_frozen=False)
    defaults = vars(type(config)())
    for assignment in assignments:
        key, text = split_assignment(assignment)
        name, *path = key.split(".")
        known = settable_names(defaults)
        if name not in known:
            raise unknown_key(name, known)
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
            changes[name] = parse_value(key, text, _plain_types(hints[name], {}))
    return dataclasses.replace(settings, **changes)


def settable_names(settings: dict[str, Any]) -> list[str]:
    """Names of the settings that a value from the command line can replace."""
    return [name for name, value in settings.items() if not name.startswith("_") and type(value) in PLAIN_TYPES]


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist, naming the nearest one that does."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ConfigError(f"Unknown setting {name!r}.{hint}")


def parse_value(key: str, text: str, accepted: set[type]) -> Any:
    """Read ``text`` as one of the ``accepted`` types; with none given, as the literal it looks like, else as a string.

    Raises:
        ConfigError: it is none of them.
    """
    value = _literal(text)
    if not accepted or type(value) in accepted:
        return value
    if type(value) is int and float in accepted:
        return float(value)
    if isinstance(value, list | tuple) and accepted & {list, tuple}:
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
    kinds = {type(value) for value in (current["grid_search"] if _is_search(current) else [current])}
    return {**values, key: parse_value(full, text, kinds if NoneType not in kinds and kinds <= PLAIN_TYPES else set())}


def _known_keys(config: AlgorithmConfig, name: str) -> Collection[str]:
    """Keys that a dict setting may hold; empty where only what it is passed to can tell."""
    if name in ("env_config", "panel_env_config"):
        return environment_keywords(config.env) if isinstance(config.env, str) else ()
    return getattr(config, name) or ()


def _accepted_types(config_class: type, name: str, current: Any, default: Any) -> set[type]:
    seen = {type(value) for value in (current, default) if type(value) in PLAIN_TYPES and not _is_search(value)}
    accepted = _declared_types(config_class).get(name) or seen
    if name.startswith(("num_cpus_", "num_gpus_")):
        accepted = accepted | {int, float}  # Ray takes fractions where RLlib declares whole numbers
    return set() if accepted == {NoneType} else accepted


def _is_search(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"grid_search"}


def _declared_types(config_class: type) -> dict[str, set[type]]:
    """Types that the config's fluent sections declare for their keywords, where these are plain."""
    declared: dict[str, set[type]] = {}
    for base in reversed(config_class.__mro__):
        for method in vars(base).values():
            if not inspect.isfunction(method) or method.__name__.startswith("_"):
                continue
            namespace = {**vars(typing), **method.__globals__}
            for name, parameter in inspect.signature(method).parameters.items():
                kinds = _plain_types(parameter.annotation, namespace)
                if parameter.kind is not parameter.KEYWORD_ONLY or not kinds:
                    continue
                # RLlib declares every keyword optional, even where its code cannot take None.
                always_optional = method.__module__.startswith("ray.") and name not in OPTIONAL_IN_RLLIB
                declared[name] = kinds - {NoneType} if always_optional else kinds
    return declared


def _plain_types(annotation: Any, namespace: dict[str, Any]) -> set[type]:
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, namespace)  # the source's own annotation, never input
        except (NameError, TypeError, AttributeError):
            return set()
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if union else (annotation,)
    kinds = {ORIGINS.get(origin := typing.get_origin(part), origin or part) for part in parts}
    return kinds if kinds <= PLAIN_TYPES else set()


def environment_keywords(env_id: str) -> frozenset[str]:
    """Keyword arguments of a registered Gymnasium environment's constructor; empty where anything may be passed."""
    return frozenset(environment_defaults(env_id))


def environment_defaults(env_id: str) -> dict[str, Any]:
    """Keyword arguments of a registered environment's constructor with their defaults; see above."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    import trial_envs

    trial_envs.register()
    try:
        entry_point = gymnasium.spec(env_id).entry_point
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        parameters = inspect.signature(creator).parameters
    except (gymnasium.error.Error, ImportError, TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {}
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}
