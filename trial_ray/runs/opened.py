"""A run folder as the viewer reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.registry import find_adapter
from trial_ray.errors import CheckpointError, TrialRayError, UserInputError
from trial_ray.models.module import load_tokenizer
from trial_ray.reports.viewer.recorded import RecordedRun, TokenTexts
from trial_ray.runs.checkpoints import find_tokenizer
from trial_ray.runs.config_record import load_commands
from trial_ray.runs.folder import CONFIG_FILE, RunFolder


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run, and in sentences what it lacks."""

    run: RecordedRun
    notes: list[str]


def open_recorded_run(
    path: Path, name: str, iteration: int | None, adapters: Sequence[EnvironmentAdapter] = ()
) -> OpenedRun:
    """Find the records, the tokenizer and the adapters of a run.

    Args:
        path: the run folder.
        name: what the page calls it.
        iteration: the one to read; ``None``: all.
        adapters: those of the user's that it was played with, which tell the classes of actions.

    Raises:
        CheckpointError: ``path`` is no run folder.
        UserInputError: it recorded no trajectories, or not those of ``iteration``.
    """
    folder = RunFolder.reopen(path)
    recorded = folder.recorded_iterations()
    if not recorded:
        raise UserInputError(f"{folder.path} has recorded no trajectories yet.")
    if iteration is not None and iteration not in recorded:
        raise UserInputError(
            f"{folder.path} recorded no iteration {iteration}; it has {recorded[0]} to {recorded[-1]}."
        )
    notes: list[str] = []
    commands = _commands(folder, iteration, name, notes)
    tokens = None
    try:
        tokens = TokenTexts(load_tokenizer(str(find_tokenizer(folder.path))))
    except TrialRayError as error:
        notes.append(f"{name}: prompts and responses are not shown, since no tokenizer decodes them. {error}")
    by_name = {title: adapter for command in commands for title, adapter in _adapters(command, adapters).items()}
    notes += _adapter_notes(commands, adapters, name)
    run = RecordedRun(
        name,
        folder.trajectories,
        folder.training,
        recorded if iteration is None else [iteration],
        max((int(command["settings"].get("max_staleness") or 0) for command in commands), default=0),
        by_name,
        tokens,
    )
    return OpenedRun(run, notes)


def _commands(folder: RunFolder, iteration: int | None, name: str, notes: list[str]) -> list[dict[str, Any]]:
    """The settings that an iteration was made with, or all of the run's; none where they cannot be read, which notes say."""
    try:
        found = load_commands(folder.path / CONFIG_FILE, iteration)
        if all(_is_config(command) for command in found):
            return found
    except CheckpointError:
        pass
    notes.append(f"{name}: classes of actions are not told apart, since there is no readable resolved_config.json.")
    return []


def _is_config(command: dict[str, Any]) -> bool:
    settings, environments = command.get("settings", {}), command.get("environments", [])
    if not isinstance(settings, dict) or not isinstance(environments, list):
        return False
    described = all(isinstance(each, dict) and isinstance(each.get("env_id"), str) for each in environments)
    return described and type(settings.get("max_staleness", 0)) in (int, NoneType)


def _adapters(command: dict[str, Any], own: Sequence[EnvironmentAdapter]) -> dict[str, EnvironmentAdapter]:
    """Adapters by the name of the run's environment, named as ``environments.entry.make_entries`` names them."""
    found: dict[str, EnvironmentAdapter] = {}
    for described in command["environments"]:
        env_id = described["env_id"]
        base = title = env_id.rpartition("/")[2]
        number = 1
        while title in found:
            number += 1
            title = f"{base}-{number}"
        found[title] = find_adapter(env_id, own)
    return found


def _adapter_notes(commands: Sequence[dict[str, Any]], own: Sequence[EnvironmentAdapter], name: str) -> Iterator[str]:
    described = [each for command in commands for each in command["environments"]]
    known = {adapter.env_id for adapter in own}
    for env_id in dict.fromkeys(each["env_id"] for each in described if "adapter" in each):
        if env_id not in known:
            yield (
                f"{name}: classes of actions of {env_id} follow from an adapter of the user's; name its file with "
                "--env-adapter FILE.py."
            )
