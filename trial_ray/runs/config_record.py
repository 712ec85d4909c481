"""The config of a run, and the commands that made it, as ``resolved_config.json`` records them.

The file holds the newest command's settings and, under ``earlier``, those of the commands before it. Each names the iteration
that it continued after (0: it began the run), its command line, its time and the versions of packages.
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

from trial_ray.algorithms.methods import method_of, new_config
from trial_ray.config.declare import RLlibSettings, fields_of, may_be_infinite, takes
from trial_ray.config.recorded import RLLIB, require_data
from trial_ray.config.renamed import RENAMED_SETTINGS
from trial_ray.config.run import EARLIER_CHAT_TEMPLATE_KWARGS
from trial_ray.config.training import RECORDED_FUNCTION, reward_name
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.errors import CheckpointError
from trial_ray.files import checked_content, finite, read_json, redacted, without_secrets
from trial_ray.runs.overrides import settable_names
from trial_ray.runs.ownership import is_signed, signature

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig

SCHEMA = "trial_ray/config"
SCHEMA_VERSION = 2
DERIVED = frozenset({"algo_class", "env_specs", "policies"})
"""Settings that constructor, sections and validation derive."""
SIGNATURE = "signature"
"""Of a command's record, by the user who gave the command."""
INFINITE = "inf"
"""A bound that is switched off; strict JSON has no such number."""
_IN_CHECKPOINT = re.compile(r"([^/]+)/checkpoints/([0-9]+)(?:/|$)")


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
        if name.startswith("_") or name in DERIVED:
            continue
        if name in names and may_be_infinite(type(config), name) and value == math.inf:
            settings[name] = INFINITE
        elif name == "reward" and callable(value):
            settings[name] = RECORDED_FUNCTION + reward_name(value)
        elif name in names and (name in decisive or is_json(value)):
            settings[name] = _as_json(value, name, other)
        else:
            other[name] = redacted(repr(value))
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "method": method_of(config),
        # Keyword arguments may be objects.
        "environments": finite(
            [
                {**entry.describe(), "name": entry.name, "labels": entry.adapter.describe_labels()}
                for entry in config.environment_entries()
            ],
            default=_as_text,
        ),
        "settings": without_secrets(settings),
        "other": other,
    }


def _decisive(cls: type) -> set[str]:
    """Settings that this package reads, except those that say what is recorded; other ones of RLlib's may be objects."""
    return {*fields_of(cls), *RLlibSettings.__annotations__, "environments"} - OF_THE_RECORDING


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


def from_record(
    record: Any,
    adapters: Sequence[EnvironmentAdapter] = (),
    method_file: str | None = None,
    source: object = "The resolved config",
) -> GRPOConfig:
    """A fresh config of the recorded method with the recorded settings; classes of RLlib's, under ``other``, are the defaults.

    A record is data, from wherever the run folder came: no file that it names is run, and of a record that this user did not
    sign no setting is read that could name code, files or servers. Of a method that has a file of its own, the settings that it
    shares with GRPO are read, unless the file is given.

    Args:
        record: what :func:`to_record` gave.
        adapters: those of the user's that the run was played with, which only code can give again.
        method_file: of a method that has a file of its own, that file.
        source: where the record was found, for the warning.

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
    settings = recorded_settings(record)
    if settings.get("clamp_scope", "microbatch") != "microbatch":
        raise CheckpointError(
            "The run was trained with clamp_scope='minibatch', which was removed: Eq. 8 clamps each microbatch. `trial-ray export` "
            "takes the model out of the run."
        )
    if not is_signed(_signed_content(record), record.get(SIGNATURE)):
        known = RLLIB | {*fields_of(type(config)), "environments"} - OF_THE_RECORDING
        settings = require_data(settings, known, finite(defaults, default=repr), source)
    for name, text in record.get("other", {}).items():
        if name.partition(".")[0] in _decisive(type(config)):
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
            if not (isinstance(value, str | None) if name == "env" else takes(type(config), name, value)):
                raise CheckpointError(
                    f"The resolved config has {name} = {value!r:.100}, which is not a value of that setting."
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
            f"The run played {env_id} with its own adapter, which is code and is not recorded: name the file that defines it with "
            "--env-adapter FILE.py."
        )
    found = finite(given.describe())
    if differing := [key for key in recorded if recorded[key] != found.get(key)]:
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
    """Read out of a run folder's ``resolved_config.json`` the config that was in force.

    Args:
        path: the file.
        adapters: as :func:`from_record`.
        method_file: as :func:`from_record`.
        iteration: which one was made with the config; ``None``: the newest command's.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    with checked_content(path):
        return from_record(command_of(read_json(path), iteration), adapters, method_file, path)


def load_method(path: Path) -> str:
    """Read from a ``resolved_config.json`` the name, or the file, of the method that the run trained; errors as above."""
    with checked_content(path):
        return str(read_json(path)["method"])


def load_commands(path: Path, iteration: int | None = None) -> list[dict[str, Any]]:
    """Read from a ``resolved_config.json`` the record of the command that made an iteration; errors as above.

    Without ``iteration``, of all commands whose iterations are the run's. Each has ``method``, ``settings``, ``environments``.
    """
    with checked_content(path):
        record = read_json(path)
        found = commands_in_force(record) if iteration is None else [command_of(record, iteration)]
        return [_whole(command) for command in found]


def _whole(command: Mapping[str, Any]) -> dict[str, Any]:
    settings, environments = recorded_settings(command), list(command.get("environments", ()))
    return {**command, "method": str(command.get("method", "")), "settings": settings, "environments": environments}


def run_labels(config: GRPOConfig) -> dict[str, Any]:
    """Method, backbone and seed of a run, as tables and figures name it."""
    return {"method": method_of(config), "backbone": backbone_of(config), "seed": config.seed}


def backbone_of(config: GRPOConfig) -> str:
    """Name of a run's first policy."""
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


def is_json(value: Any) -> bool:
    """Whether JSON has a form for the value; also for numbers that are not finite, as Python writes them."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# -- the commands that made a run ----------------------------------------------------------------------------------------

Record = Mapping[str, Any]
"""The record of a command's config (:func:`to_record`), with the keys that are named above."""


def all_commands(newest: Record) -> list[Record]:
    """Every command of a run, in order.

    Args:
        newest: what ``resolved_config.json`` holds; of a version that kept the first command alone, that is all there is.

    Raises:
        CheckpointError: it is no such record.
    """
    if not isinstance(newest, Mapping) or not isinstance(earlier := newest.get("earlier", []), list):
        raise CheckpointError("The resolved config has no records of the run's commands.")
    found = [*earlier, newest]
    if not all(isinstance(each, Mapping) and type(_after(each)) is int for each in found):
        raise CheckpointError("The resolved config has a command that is not recorded as one.")
    return found


def commands_in_force(newest: Record) -> list[Record]:
    """The commands whose iterations are the run's, in order: one that continued after an earlier iteration replaced the rest.

    Raises:
        CheckpointError: as :func:`all_commands`.
    """
    kept: list[Record] = []
    for command in all_commands(newest):
        while kept and _after(kept[-1]) >= _after(command):
            kept.pop()
        kept.append(command)
    return kept


def command_of(newest: Record, iteration: int | None) -> Record:
    """The command that made an iteration, or played the evaluation set before the first one (0); ``None``: the newest command.

    Raises:
        CheckpointError: as :func:`all_commands`.
    """
    commands = commands_in_force(newest)
    if iteration is None:
        return commands[-1]
    made = [command for command in commands if _after(command) < max(1, iteration)]
    return (made or commands[:1])[-1]


def with_command(before: Record | None, record: Record, *, again: bool) -> dict[str, Any]:
    """``resolved_config.json`` with one more command.

    Args:
        before: what the file held; ``None`` of a new run.
        record: of the command.
        again: the newest command in the file is this one, which now continues after another iteration (a restart).

    Raises:
        CheckpointError: as :func:`all_commands`.
    """
    earlier = all_commands(before) if before is not None else []
    if again:
        record = {**record, "after_iteration": min(_after(record), _after(earlier.pop()))}
    return {
        **record,
        SIGNATURE: signature(_signed_content(record)),
        "earlier": [{name: value for name, value in each.items() if name != "earlier"} for each in earlier],
    }


def _signed_content(record: Record) -> bytes:
    signed = {name: value for name, value in record.items() if name not in (SIGNATURE, "earlier")}
    return json.dumps(signed, sort_keys=True).encode()


OF_THE_RECORDING = frozenset({"trajectories_folder", "training_folder", "max_recorded_tokens"})
"""Settings that say what is recorded and where, which does not change what a run is."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that had another value from some iteration on, because the run was resumed with it.

    Attributes:
        iteration: the first one with the new value, counted from 1.
        name: of the setting.
        before: its value up to then; ``None`` also where it was not recorded.
        after: its value from then on, likewise.
    """

    iteration: int
    name: str
    before: Any
    after: Any


def setting_changes(commands: Sequence[Record]) -> list[SettingChange]:
    """The settings, and what decides tasks and prompts of environments, in which each command differs from the one before it.

    Args:
        commands: in order, such as :func:`commands_in_force` gives.
    """
    return [
        SettingChange(_after(later) + 1, name, before.get(name), after.get(name))
        for earlier, later in pairwise(commands)
        for before, after in [(_compared(earlier), _compared(later))]
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _compared(command: Record) -> dict[str, Any]:
    settings = {name: value for name, value in recorded_settings(command).items() if name not in OF_THE_RECORDING}
    return {"method": command["method"], "environments": command.get("environments"), **settings}


def recorded_settings(command: Record) -> dict[str, Any]:
    """The recorded settings by the names that they have now, with one that earlier versions had in the code."""
    named = {RENAMED_SETTINGS.get(name, name): value for name, value in command.get("settings", {}).items()}
    return {"chat_template_kwargs": EARLIER_CHAT_TEMPLATE_KWARGS, **named}


def _after(command: Record) -> int:
    after: int = command.get("after_iteration", 0)
    return after
