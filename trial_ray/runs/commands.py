"""The commands that made a run, in order, and the settings that each of its iterations was made with.

``resolved_config.json`` holds the newest command's settings and, under ``earlier``, those of the commands before it. Each names
the iteration that it continued after (0: it began the run), its command line, its time and the versions of packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from trial_ray.errors import CheckpointError
from trial_ray.reports.records import OF_THE_RECORDING, SettingChange

Record = Mapping[str, Any]
"""What ``config_record.to_record`` gives of a command's config, with the keys that are named above."""


def all_commands(newest: Record) -> list[Record]:
    """Every command of a run, in order.

    Args:
        newest: what ``resolved_config.json`` holds; of a version that kept the first command alone, that is all there is.

    Raises:
        CheckpointError: it is no such record.
    """
    if not isinstance(newest, Mapping) or not isinstance(earlier := newest.get("earlier", []), list):
        raise CheckpointError("The resolved config does not hold the records of a run's commands.")
    found = [*earlier, newest]
    if not all(isinstance(each, Mapping) and type(_after(each)) is int for each in found):
        raise CheckpointError("The resolved config holds a command that is no record of one.")
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
    """The command that made an iteration, or played the panel before the first one (0); ``None``: the newest command.

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
    return {**record, "earlier": [_alone(each) for each in earlier]}


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
    settings = {name: value for name, value in command["settings"].items() if name not in OF_THE_RECORDING}
    return {"method": command["method"], "environments": command.get("environments"), **settings}


def _after(command: Record) -> int:
    after: int = command.get("after_iteration", 0)
    return after


def _alone(command: Record) -> dict[str, Any]:
    return {name: value for name, value in command.items() if name != "earlier"}
