"""Settings of a run, as every command that trained it recorded them in ``resolved_config.json``.

The file contains the record of the newest command and, under ``earlier``, the records of previous commands. A record has the
settings, the iteration after which the command continued the run (0: it started the run), its command line, its time and the
package versions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.algorithms.methods import method_of, new_config
from trial_ray.config.declare import RLlibSettings, accepts, fields_of, may_be_infinite
from trial_ray.config.training import RECORDED_FUNCTION, reward_name
from trial_ray.errors import CheckpointError
from trial_ray.files import Json, Record, checked_content, finite, read_json
from trial_ray.runs.experiment import settable_names
from trial_ray.secrets import redacted, without_secrets
from trial_ray.trust import RLLIB, is_signed, require_data, signature

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig

SCHEMA = "trial_ray/config"
SCHEMA_VERSION = 2
DERIVED = frozenset({"algo_class", "env_specs", "policies"})
"""Attributes of a config that are derived from its settings, and therefore not recorded."""
SIGNATURE = "signature"
"""Key of a record's signature, which is made with the private key of the user who ran the command."""
INFINITE = "inf"
"""Recorded value of an infinite setting, which means no limit; strict JSON has no infinite number."""
_IN_CHECKPOINT = re.compile(r"([^/]+)/checkpoints/([0-9]+)(?:/|$)")


def to_record(config: GRPOConfig) -> Json:
    """Return the JSON record of ``config``, without secrets, as it is read back from a file.

    ``settings`` has every setting that JSON can represent, and ``other`` the ``repr`` of the rest. Paths are recorded as strings.
    Inside dicts and lists, an object that JSON cannot represent becomes null; ``other`` has its ``repr`` under a dotted name.

    ``environments`` has the data that determines each environment's tasks and prompts, and its title and labels in reports; a
    user's environment adapter is code and is not recorded.
    """
    settings: Json = {}
    other: dict[str, str] = {}
    names, used = settable_names(vars(config)), _used_settings(type(config))
    for name, value in sorted(vars(config).items()):
        if name.startswith("_") or name in DERIVED:
            continue
        if name in names and may_be_infinite(type(config), name) and value == math.inf:
            settings[name] = INFINITE
        elif name == "reward" and not isinstance(value, str):
            settings[name] = RECORDED_FUNCTION + reward_name(value)
        elif name in names and (name in used or is_json(value)):
            settings[name] = _as_json(value, name, other)
        else:
            other[name] = redacted(repr(value))
    record = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "method": method_of(config),
        "environments": [
            {**entry.describe(), "name": entry.name, "labels": entry.adapter.describe_labels()}
            for entry in config.environment_entries()
        ],
        "settings": without_secrets(settings),
        "other": other,
    }
    # Keyword arguments of environments may be objects, which _as_text converts.
    return finite(record, default=_as_text)


def _used_settings(cls: type) -> set[str]:
    """Return the names of the settings that this package reads, except ``RECORDING_SETTINGS``."""
    return {*fields_of(cls), *RLlibSettings.__annotations__, "environments"} - RECORDING_SETTINGS


def _as_json(value: Any, name: str, other: dict[str, str]) -> Any:
    """Return the value as strict JSON; objects that JSON cannot represent become null, and their ``repr`` is added to ``other``."""
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


def from_record(
    record: Any,
    adapters: Sequence[EnvironmentAdapter] = (),
    method_file: str | None = None,
    source: object = "The resolved config",
) -> GRPOConfig:
    """Create a config of the recorded method with the recorded settings.

    Settings that the record has only in ``other``, such as RLlib's classes, keep their defaults.

    A record is untrusted data. Files that it names are not run. Settings that could name code, files or servers are read only
    if the current user signed the record. If the method has its own file, only the settings that it shares with GRPO are read,
    unless ``method_file`` is given.

    Args:
        record: a record made by :func:`to_record`.
        adapters: the user's environment adapters of the run, which only code can provide.
        method_file: the Python file of the run's method; ``None`` if there is none, or if it must not run.
        source: file of the record, for the warning about settings that are not read because the record is not signed.

    Raises:
        CheckpointError: the record is invalid, has another version, needs an adapter that is not among ``adapters``, or has
            only the ``repr`` of a setting that this package reads.
    """
    if not isinstance(record, dict) or (record.get("schema"), record.get("schema_version")) != (SCHEMA, SCHEMA_VERSION):
        raise CheckpointError(f"Expected a resolved config of schema {SCHEMA} version {SCHEMA_VERSION}.")
    for environment in record["environments"]:
        _require_adapter(environment, adapters)
    method = record["method"]
    config = new_config((method_file or "grpo") if method.endswith(".py") else method)
    defaults = vars(config)
    settings = record["settings"]
    if not is_signed(_signed_content(record), record.get(SIGNATURE)):
        known = RLLIB | _used_settings(type(config))
        settings = require_data(settings, known, finite(defaults, default=repr), source)
    for name, text in record.get("other", {}).items():
        if name.partition(".")[0] in _used_settings(type(config)):
            raise CheckpointError(
                f"The resolved config has {name} only as the text {text!r:.100}, which cannot be read back. Expected numbers, "
                "texts, paths, lists and dicts. `trial-ray export` takes the model out of the run; state the settings that it "
                "is used with."
            )
    for name in settable_names(defaults):
        if name in settings:
            value = settings[name]
            if value == INFINITE and may_be_infinite(type(config), name):
                value = math.inf
            if not (isinstance(value, str | None) if name == "env" else accepts(type(config), name, value)):
                raise CheckpointError(
                    f"The resolved config has {name} = {value!r:.100}, which is not a value of that setting."
                )
            setattr(config, name, tuple(value) if isinstance(defaults[name], tuple) else value)
    config.adapters = tuple(adapters)
    return config


def _require_adapter(environment: Json, adapters: Sequence[EnvironmentAdapter]) -> None:
    if "adapter" not in environment:
        return
    env_id, recorded = environment["env_id"], environment["adapter"]
    adapter = next((adapter for adapter in adapters if adapter.env_id == env_id), None)
    if adapter is None:
        raise CheckpointError(
            f"The run played {env_id} with its own adapter, which is code and is not recorded: name the file that defines it with "
            "--env-adapter FILE.py."
        )
    described = finite(adapter.describe())
    if differing := [key for key in recorded if recorded[key] != described.get(key)]:
        raise CheckpointError(
            f"The adapter of {env_id} is not the run's: {', '.join(differing)} differ. Give the adapter that the run was trained "
            "with."
        )


def load_record(
    path: Path,
    adapters: Sequence[EnvironmentAdapter] = (),
    method_file: str | None = None,
    iteration: int | None = None,
) -> GRPOConfig:
    """Read a run's config from its ``resolved_config.json``.

    Args:
        path: the file.
        adapters: as :func:`from_record`.
        method_file: as :func:`from_record`.
        iteration: iteration whose config is read; ``None`` reads the config of the newest command.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is rejected by :func:`from_record`.
    """
    with checked_content(path):
        return from_record(command_of(commands_in_force(read_json(path)), iteration), adapters, method_file, path)


def load_method(path: Path) -> str:
    """Read the name or file of a run's method from ``resolved_config.json``.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    with checked_content(path):
        return str(read_json(path)["method"])


def load_commands(path: Path) -> list[Json]:
    """Read the records of all commands that trained a run's iterations, from its ``resolved_config.json``.

    Each record has ``method``, ``settings`` and ``environments``.

    Raises:
        CheckpointError: the file is missing, cannot be read, or has no valid records.
    """
    with checked_content(path):
        return [
            {
                **command,
                "method": str(command.get("method", "")),
                "settings": {**command.get("settings", {})},
                "environments": list(command.get("environments", ())),
            }
            for command in commands_in_force(read_json(path))
        ]


def run_labels(config: GRPOConfig) -> Json:
    """Return the labels of a run in tables and figures: ``method``, ``backbone`` (its initial policy) and ``seed``."""
    return {"method": method_of(config), "backbone": backbone_of_settings(vars(config)), "seed": config.seed}


def backbone_of_settings(settings: Record) -> str:
    """Return the name of the run's initial policy, given its settings."""
    warm_start = settings.get("warm_start")
    if warm_start is not None:
        base = warm_start.get("model_path")
        return f"warm-started {_last_part(base) if base else warm_start.get('size', 'tiny')}"
    return _last_part(str(settings.get("model_path")))


def _last_part(path: str) -> str:
    # Model folders have the same name in all checkpoints: return the run and the iteration instead.
    if checkpoint := _IN_CHECKPOINT.search(path):
        return f"{checkpoint[1]}, iteration {int(checkpoint[2])}"
    return path.rstrip("/").rpartition("/")[2].removeprefix("package:").removeprefix("llm-")


def is_json(value: Any) -> bool:
    """Return True if JSON can represent the value, including non-finite numbers in Python's notation."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# -- the commands that made a run ----------------------------------------------------------------------------------------


def all_commands(newest: Record) -> list[Record]:
    """Return the records of all commands of a run, in order.

    Args:
        newest: content of ``resolved_config.json``.

    Raises:
        CheckpointError: the content is not a record of commands.
    """
    if not isinstance(earlier := newest.get("earlier", []), list):
        raise CheckpointError("The resolved config has no records of the run's commands.")
    commands = [*earlier, newest]
    if not all(isinstance(command, Mapping) and type(_after_iteration(command)) is int for command in commands):
        raise CheckpointError("The resolved config has an invalid record of a command.")
    return commands


def commands_in_force(newest: Record) -> list[Record]:
    """Return the records of the commands that trained the run's current iterations, in order.

    A command that continues after an iteration repeats all later iterations, so it replaces the records of earlier commands
    that continued after the same or a later iteration.

    Raises:
        CheckpointError: as :func:`all_commands`.
    """
    kept: list[Record] = []
    for command in all_commands(newest):
        while kept and _after_iteration(kept[-1]) >= _after_iteration(command):
            kept.pop()
        kept.append(command)
    return kept


def command_of(commands: Sequence[Record], iteration: int | None) -> Record:
    """Return the record of the command that trained an iteration.

    Args:
        commands: result of :func:`commands_in_force`.
        iteration: the iteration; 0 selects the command that evaluated the policy before training, ``None`` the newest command.
    """
    if iteration is None:
        return commands[-1]
    candidates = [command for command in commands if _after_iteration(command) < max(1, iteration)]
    return (candidates or commands[:1])[-1]


def with_command(before: Record | None, record: Record, *, again: bool) -> Json:
    """Return the content of ``resolved_config.json`` with the record of one more command.

    Args:
        before: previous content of the file; ``None`` for a new run.
        record: record of the command.
        again: whether the command has restarted its run, so that the file already has a record of it; that record is replaced.

    Raises:
        CheckpointError: as :func:`all_commands`.
    """
    earlier = all_commands(before) if before is not None else []
    if again:
        record = {**record, "after_iteration": min(_after_iteration(record), _after_iteration(earlier.pop()))}
    return {
        **record,
        SIGNATURE: signature(_signed_content(record)),
        "earlier": [{name: value for name, value in command.items() if name != "earlier"} for command in earlier],
    }


def _signed_content(record: Record) -> bytes:
    signed = {name: value for name, value in record.items() if name not in (SIGNATURE, "earlier")}
    return json.dumps(signed, sort_keys=True).encode()


RECORDING_SETTINGS = frozenset({"trajectories_folder", "training_folder", "max_recorded_tokens"})
"""Settings that determine which data are recorded, and where; they do not affect training."""


@dataclass(frozen=True)
class SettingChange:
    """A change of a setting at an iteration, because the run was resumed with another value.

    Attributes:
        iteration: first iteration with the new value, counted from 1.
        name: name of the setting.
        before: previous value; ``None`` also if it was not recorded.
        after: new value; ``None`` also if it was not recorded.
    """

    iteration: int
    name: str
    before: Any
    after: Any


def setting_changes(commands: Sequence[Record]) -> list[SettingChange]:
    """Return the changes of the method, the environments and the settings between consecutive commands.

    Args:
        commands: records of commands in order, for example from :func:`commands_in_force`.
    """
    return [
        SettingChange(_after_iteration(later) + 1, name, before.get(name), after.get(name))
        for earlier, later in pairwise(commands)
        for before, after in [(_compared(earlier), _compared(later))]
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _compared(command: Record) -> Json:
    settings = {name: value for name, value in command["settings"].items() if name not in RECORDING_SETTINGS}
    return {"method": command["method"], "environments": command.get("environments"), **settings}


def _after_iteration(command: Record) -> int:
    return command.get("after_iteration", 0)
