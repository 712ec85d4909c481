"""The config of a run, as its folder records it and as an experiment file repeats it."""

from __future__ import annotations

import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from trial_ray.algorithms.methods import method_names, method_of, new_config
from trial_ray.config.declare import fields_of, may_be_infinite, sections_of
from trial_ray.config.run import RLlibSettings
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import CheckpointError, TrialRayError
from trial_ray.files import redacted, without_secrets, write_text
from trial_ray.reports.records import OF_THE_RECORDING
from trial_ray.runs.commands import command_of, commands_in_force
from trial_ray.runs.overrides import is_of_setting, settable_names

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.environments.registry import EnvironmentEntry

SCHEMA = "trial_ray/config"
SCHEMA_VERSION = 2
INFINITE = "inf"
"""A bound that is switched off; strict JSON has no such number."""
_IN_CHECKPOINT = re.compile(r"([^/]+)/checkpoints/([0-9]+)(?:/|$)")
Read = TypeVar("Read")


def to_record(config: GRPOConfig) -> dict[str, Any]:
    """Every setting of ``config`` that JSON can hold, and under ``other`` how the rest would print; secrets are left out.

    Paths are recorded as texts. Other objects inside a dict or list are null there, and under ``other`` by their dotted names.

    Of the environments it holds, under ``environments``, what decides their tasks and prompts, and what reports call them; the
    code of a user's adapter is in the file that defines it.
    """
    settings: dict[str, Any] = {}
    other: dict[str, str] = {}
    names, decisive = settable_names(vars(config)), _decisive(type(config))
    for name, value in sorted(vars(config).items()):
        if name.startswith("_"):
            continue
        if name in names and may_be_infinite(type(config), name) and value == math.inf:
            settings[name] = INFINITE
        elif name in names and (name in decisive or is_json(value)):
            settings[name] = _as_json(value, name, other)
        else:
            other[name] = redacted(repr(value))
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "method": method_of(config),
        # Keyword arguments may be objects.
        "environments": json.loads(
            json.dumps([_describe(entry) for entry in config.environment_entries()], default=_as_text)
        ),
        "settings": without_secrets(settings),
        "other": other,
    }


def _decisive(cls: type) -> set[str]:
    """Settings that this package reads, except those that say what is recorded; other ones of RLlib's may be objects."""
    own = {*fields_of(cls), *RLlibSettings.__annotations__}
    return own - {"method_class", "adapters", "env_specs"} - OF_THE_RECORDING


def _as_json(value: Any, name: str, other: dict[str, str]) -> Any:
    """The value as strict JSON; objects that it has no form for become null, and are put into ``other`` as texts."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(inner, f"{name}.{key}", other) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner, f"{name}.{index}", other) for index, inner in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if is_json(value) and (not isinstance(value, float) or math.isfinite(value)):
        return value
    other[name] = redacted(repr(value))
    return None


def _as_text(value: Any) -> str:
    return str(value) if isinstance(value, PurePath) else repr(value)


def _describe(entry: EnvironmentEntry) -> dict[str, Any]:
    return {**entry.describe(), "name": entry.name, "labels": entry.adapter.labels()}


def from_record(record: Any, adapters: Sequence[EnvironmentAdapter] = (), method_file: str | None = None) -> GRPOConfig:
    """A fresh config of the recorded method with the recorded settings; classes of RLlib's, under ``other``, are the defaults.

    A record is data, from wherever the run folder came: no file that it names is run. Of a method that has a file of its
    own, the settings that it shares with GRPO are read, unless the file is given.

    Args:
        record: what :func:`to_record` gave.
        adapters: those of the user's that the run was played with, which only code can give again.
        method_file: of a method that has a file of its own, that file.

    Raises:
        CheckpointError: not such a record, of another version, of a run with an adapter that is not among ``adapters``, or with
            a setting that decides results and is there as a text alone.
    """
    if not isinstance(record, dict) or (record.get("schema"), record.get("schema_version")) != (SCHEMA, SCHEMA_VERSION):
        raise CheckpointError(f"Expected a resolved config of schema {SCHEMA} version {SCHEMA_VERSION}.")
    for environment in record["environments"]:
        _require_adapter(environment, adapters)
    method = record["method"]
    config = new_config((method_file or "grpo") if method.endswith(".py") else method)
    defaults = vars(config)
    for name, text in record.get("other", {}).items():
        if name.partition(".")[0] in _decisive(type(config)):
            raise CheckpointError(
                f"The resolved config has {name} only as the text {text!r:.100}, which cannot be read back. Expected numbers, "
                "texts, paths, lists and dicts. `trial-ray export` takes the model out of the run; state the settings that it "
                "is used with."
            )
    for name in settable_names(defaults):
        if name in record["settings"]:
            value = record["settings"][name]
            if value == INFINITE and may_be_infinite(type(config), name):
                value = math.inf
            if not is_of_setting(type(config), name, value):
                raise CheckpointError(
                    f"The resolved config has {name} = {value!r:.100}, which is no value of that setting."
                )
            setattr(config, name, tuple(value) if isinstance(defaults[name], tuple) else value)
    config.adapters = tuple(adapters)
    return config


def _require_adapter(environment: dict[str, Any], adapters: Sequence[EnvironmentAdapter]) -> None:
    if "adapter" not in environment:
        return
    env_id, recorded = environment["env_id"], environment["adapter"]
    given = next((adapter for adapter in adapters if adapter.env_id == env_id), None)
    if given is None:
        raise CheckpointError(
            f"The run played {env_id} with an adapter of its own, which only code can give again: name the file that defines "
            "it with --env-adapter FILE.py."
        )
    found = json.loads(json.dumps(given.describe()))
    if differing := [key for key in recorded if recorded[key] != found.get(key)]:
        raise CheckpointError(
            f"The adapter of {env_id} is another one than the run's: {', '.join(differing)} differ. Give the one that the run "
            "was trained with."
        )


def load_record(
    path: Path,
    adapters: Sequence[EnvironmentAdapter] = (),
    method_file: str | None = None,
    iteration: int | None = None,
) -> GRPOConfig:
    """Read out of a run folder's ``resolved_config.json`` the config that was in force.

    Args:
        path: the file.
        adapters: as :func:`from_record`.
        method_file: as :func:`from_record`.
        iteration: which one was made with the config; ``None``: the newest command's.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    return _reading(path, lambda record: from_record(command_of(record, iteration), adapters, method_file))


def load_method(path: Path) -> str:
    """Read from a ``resolved_config.json`` the name, or the file, of the method that the run trained; errors as above."""
    return _reading(path, lambda record: str(record["method"]))


def load_commands(path: Path, iteration: int | None = None) -> list[dict[str, Any]]:
    """Read from a ``resolved_config.json`` the record of the command that made an iteration; errors as above.

    Without ``iteration``, of all commands whose iterations are the run's. Each has ``method``, ``settings``, ``environments``.
    """

    def read(record: Any) -> list[dict[str, Any]]:
        found = commands_in_force(record) if iteration is None else [command_of(record, iteration)]
        return [_whole(command) for command in found]

    return _reading(path, read)


def _whole(command: Mapping[str, Any]) -> dict[str, Any]:
    settings, environments = dict(command.get("settings", {})), list(command.get("environments", ()))
    return {**command, "method": str(command.get("method", "")), "settings": settings, "environments": environments}


def run_labels(config: GRPOConfig) -> dict[str, Any]:
    """Method, backbone and seed of a run, as tables and figures name it."""
    return {"method": method_of(config), "backbone": backbone_of(config), "seed": config.seed}


def backbone_of(config: GRPOConfig) -> str:
    """What a run's first policy is called."""
    return backbone_of_settings({"warm_start": config.warm_start, "model_path": config.model_path})


def backbone_of_settings(settings: Mapping[str, Any]) -> str:
    """The same, out of recorded settings."""
    warm_start = settings.get("warm_start")
    if warm_start is not None:
        base = warm_start.get("model_path")
        return f"warm-started {_last_part(base) if base else warm_start.get('size', 'tiny')}"
    return _last_part(str(settings.get("model_path")))


def _last_part(path: str) -> str:
    if found := _IN_CHECKPOINT.search(path):  # in each, the model's folder has the same name
        return f"{found[1]}, iteration {int(found[2])}"
    return path.rstrip("/").rpartition("/")[2].removeprefix("package:").removeprefix("llm-")


def _reading(path: Path, read: Callable[[Any], Read]) -> Read:
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, TrialRayError):
            raise
        raise CheckpointError(f"Cannot read the resolved config {path}: {error}.") from error


def is_json(value: Any) -> bool:
    """Whether JSON has a form for the value; also for numbers that are not finite, as Python writes them."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


FIRST_SECTIONS = ("environment", "policy", "training")
"""How experiment files begin; the other sections follow by name."""
DERIVED = frozenset({"algo_class", "env_specs", "policies"})
"""What constructor, sections and validation set by themselves."""
WIDTH = 120


def write_experiment(
    path: Path,
    config: GRPOConfig,
    stop: dict[str, float],
    summary: str,
    source: Path,
    chosen: Iterable[str],
    overrides: Sequence[str] = (),
) -> None:
    """Write an experiment file that gives ``config`` and ``stop``.

    It states every setting that differs from its default. Where some of them are objects, such as an adapter of the user's
    own, it takes the config of the file that made them, and states overrides and what was chosen.

    Args:
        path: of the file.
        config: without search values.
        stop: as in an experiment file.
        summary: the file's docstring.
        source: the file that ``config`` was made from.
        chosen: names of the settings in which it differs from what is in ``source`` with the overrides.
        overrides: ``key=value`` each, set in the config of ``source``.
    """
    body = _from_source(config, source, chosen, overrides) if _has_objects(config) else _whole_config(config)
    docstring = textwrap.fill(summary.replace("\\", "\\\\").replace('"', "'"), WIDTH - 6)
    write_text(path, "\n".join([f'"""{docstring}"""', "", *body, f"stop = {literal(stop)}", ""]))


def _from_source(config: GRPOConfig, source: Path, chosen: Iterable[str], overrides: Sequence[str]) -> list[str]:
    settings = {name: getattr(config, name) for name in sorted(set(chosen))}
    # load_experiment finds modules beside the file.
    return [
        "from trial_ray.runs.experiment import load_experiment",
        "from trial_ray.runs.overrides import apply_overrides",
        "",
        f"source = load_experiment({literal(str(source.resolve()))}).config",
        f"config = apply_overrides(source, {literal(list(overrides))})",
        f"config.update_from_dict({literal(settings)})",
    ]


def _whole_config(config: GRPOConfig) -> list[str]:
    sections, rest = _by_section(config)
    if method_of(config) in method_names():
        made = [f"from {type(config).__module__} import {type(config).__name__}", ""]
        made += ["config = (", f"    {type(config).__name__}()"]
    else:
        made = ["from trial_ray.algorithms.methods import new_config", ""]
        made += ["config = (", f"    new_config({literal(method_of(config))})"]
    for name, settings in sections.items():
        made.append(f"    .{name}(")
        made += [f"        {keyword}={literal(value, 8)}," for keyword, value in settings.items()]
        made.append("    )")
    # Settings of RLlib's that no section takes.
    return [*made, ")", *([f"config.update_from_dict({literal(rest)})"] if rest else [])]


def _has_objects(config: GRPOConfig) -> bool:
    """Whether a setting that differs from its default cannot be written down."""
    defaults = vars(type(config)())
    return any(
        not is_json(value) and repr(value) != repr(defaults[name])
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in DERIVED and name in defaults
    )


def _by_section(config: GRPOConfig) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Keywords of the fluent methods that set what differs from the defaults, and settings that none of them sets."""
    methods = _keywords(type(config))
    played = ("environments",) if config.environments else ("env", "env_config")
    chosen = {name: getattr(config, name) for name in played}
    # An environment brings defaults of its own.
    defaults = vars(type(config)().environment(**chosen))
    plain = [name for name in settable_names(vars(config)) if name in defaults and name not in DERIVED]
    changed = {
        name: value for name, value in vars(config).items() if name in plain and value != defaults[name]
    } | chosen
    found: dict[str, dict[str, Any]] = {}
    for name in changed.keys() & methods.keys():
        method, keyword = methods[name]
        found.setdefault(method, {})[keyword] = changed[name]
    order = {name: index for index, name in enumerate(FIRST_SECTIONS)}
    names = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    rest = {name: value for name, value in changed.items() if name not in methods}
    return {name: dict(sorted(found[name].items())) for name in names}, rest


def _keywords(cls: type) -> dict[str, tuple[str, str]]:
    """Fluent method and keyword of every setting: of RLlib's sections, then of this package's."""
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    methods: dict[str, tuple[str, str]] = {}
    for name, function in vars(AlgorithmConfig).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            parameters = inspect.signature(function).parameters.values()
            methods |= {each.name: (name, each.name) for each in parameters if each.kind is each.KEYWORD_ONLY}
    methods |= {name: ("environment", name) for name in ("env", "env_config", "environments")}
    for section in sections_of(cls):
        methods |= {field.name: (section.name, keyword) for keyword, field in section.keywords(cls).items()}
    return {name: found for name, found in methods.items() if name in {*fields_of(cls), *vars(cls())}}


def literal(value: Any, indent: int = 0) -> str:
    """Plain values as Python, on one line if it is short, else one element a line.

    Args:
        value: what JSON can hold, a tuple, or a number that is not finite.
        indent: characters before the line that it begins on.
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if not isinstance(value, dict | list | tuple) or not value:
        return repr(value)
    opening, closing = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}[type(value)]
    for inner in (0, indent + 4):
        if isinstance(value, dict):
            parts = [f"{literal(key)}: {literal(each, inner)}" for key, each in value.items()]
        else:
            parts = [literal(each, inner) for each in value]
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        line = f"{opening}{', '.join(parts)}{comma}{closing}"
        if not inner and "\n" not in line and len(line) + indent < WIDTH - 30:
            return line
    spaces = " " * (indent + 4)
    return "\n".join([opening, *(f"{spaces}{part}," for part in parts), " " * indent + closing])
