"""A run folder as the viewer reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.entry import find_adapter
from trial_ray.errors import TrialRayError, UserInputError
from trial_ray.experiments.checkpoints import find_tokenizer
from trial_ray.experiments.run_folder import RunFolder
from trial_ray.models.causal_lm_module import load_tokenizer
from trial_ray.viewer.recorded_run import RecordedRun
from trial_ray.viewer.token_texts import TokenTexts


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
    record = _config(folder, name, notes)
    tokens = None
    try:
        tokens = TokenTexts(load_tokenizer(str(find_tokenizer(folder.path))))
    except TrialRayError as error:
        notes.append(f"{name}: prompts and responses are not shown, since no tokenizer decodes them. {error}")
    by_name = _adapters(record, adapters, name, notes)
    run = RecordedRun(
        name,
        folder.trajectories,
        folder.training,
        recorded if iteration is None else [iteration],
        int(record.get("settings", {}).get("max_staleness") or 0),
        by_name,
        tokens,
    )
    return OpenedRun(run, notes)


def _config(folder: RunFolder, name: str, notes: list[str]) -> dict[str, Any]:
    """The resolved config as it was recorded; an empty one where it cannot be read, which notes say."""
    try:
        record = json.loads((folder.path / "resolved_config.json").read_text(encoding="utf-8"))
        if _is_config(record):
            return dict(record)
    except (OSError, ValueError, RecursionError):
        pass
    notes.append(f"{name}: classes of actions are not told apart, since there is no readable resolved_config.json.")
    return {}


def _is_config(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    settings, environments = record.get("settings", {}), record.get("environments", [])
    if not isinstance(settings, dict) or not isinstance(environments, list):
        return False
    described = all(isinstance(each, dict) and isinstance(each.get("env_id"), str) for each in environments)
    return described and type(settings.get("max_staleness", 0)) in (int, NoneType)


def _adapters(
    record: dict[str, Any], own: Sequence[EnvironmentAdapter], name: str, notes: list[str]
) -> dict[str, EnvironmentAdapter]:
    """Adapters by the name of the run's environment, named as ``environments.entry.make_entries`` names them."""
    found: dict[str, EnvironmentAdapter] = {}
    for described in record.get("environments", ()):
        env_id = described["env_id"]
        base = title = env_id.rpartition("/")[2]
        number = 1
        while title in found:
            number += 1
            title = f"{base}-{number}"
        found[title] = find_adapter(env_id, own)
        if "adapter" in described and env_id not in [adapter.env_id for adapter in own]:
            notes.append(
                f"{name}: classes of actions of {env_id} follow from an adapter of the user's; name its file with "
                "--env-adapter FILE.py."
            )
    return found
