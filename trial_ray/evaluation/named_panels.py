"""Panels by name: sizes that fit any split, and committed lists of tasks that never change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.evaluation.panel import Panel, PanelError, instructions_digest

if TYPE_CHECKING:
    from trial_ray.environments.entry import EnvironmentEntry

SIZES: dict[str, int | None] = {"quick": 32, "standard": 256, "full": None}
"""Panels that are a number of tasks of whatever split; None is every task."""
FOLDER = Path(__file__).parent / "panels"
SEED = 0
"""Chooses the tasks of panels that are not committed."""


def panel_names() -> list[str]:
    """Every name that :func:`choose_panel` knows."""
    return [*SIZES, *sorted(file.stem for file in FOLDER.glob("*.json"))]


def choose_panel(entry: EnvironmentEntry, panel: str | int = "full") -> Panel:
    """The tasks to play, the same ones on every machine.

    Args:
        entry: the environment, with the split in its keyword arguments.
        panel: one of :func:`panel_names`, or a number of tasks.

    Raises:
        PanelError: the panel belongs to another environment or split, or the data set at hand is another one than the
            panel was made from.
    """
    if isinstance(panel, int) or panel in SIZES:
        size = panel if isinstance(panel, int) else SIZES[panel]
        return Panel.from_entry(entry, size, seed=SEED)
    committed = read_panel(panel)
    if (committed.env_id, committed.split) != (entry.env_id, entry.split):
        raise PanelError(
            f"Panel {panel!r} is of {committed.env_id} split {committed.split!r}; asked for {entry.env_id} split "
            f"{entry.split!r}."
        )
    missing = sorted(set(committed.task_ids) - set(entry.tasks()))
    if missing:
        raise PanelError(
            f"The data at hand lack {len(missing)} of the {len(committed)} tasks of panel {panel!r}, for example "
            f"{missing[0]!r}; they are not the release that the panel was chosen from."
        )
    found = instructions_digest(entry, committed.task_ids)
    if found != committed.instructions:
        raise PanelError(
            f"The data at hand are not those of panel {panel!r}: the same ids ask for something else (digest of the "
            f"instructions {found[:12]}, expected {committed.instructions[:12]}). Choose --panel full or --episodes N instead."
        )
    return committed


def read_panel(name: str) -> Panel:
    """A committed panel.

    Raises:
        PanelError: there is none of this name, or its file was changed.
    """
    path = FOLDER / f"{name}.json"
    if name not in panel_names() or not path.is_file():
        raise PanelError(f"There is no panel {name!r}; the panels are {', '.join(panel_names())}.")
    value = json.loads(path.read_text(encoding="utf-8"))
    panel = Panel(value["env"], value["split"], tuple(value["task_ids"]), value["instructions_sha256"])
    if panel.digest != value["sha256"]:
        raise PanelError(f"{path} was changed: its tasks have digest {panel.digest[:12]}, not {value['sha256'][:12]}.")
    return panel
