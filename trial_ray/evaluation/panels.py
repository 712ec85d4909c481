"""Evaluation sets: fixed tasks in a fixed order, drawn or by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import UserInputError
from trial_ray.files import text_digest

if TYPE_CHECKING:
    from trial_ray.environments.registry import EnvironmentEntry

PROBED = 2


class PanelError(UserInputError):
    """An evaluation set cannot be made or read."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Tasks of one split of one environment, in a fixed order.

    Attributes:
        env_id: a Gymnasium id, for example ``trial/ALFWorld-v0``.
        split: the environment's split that the tasks are from.
        task_ids: each once.
        instructions: SHA-256 (hexadecimal) of the instructions of the first :data:`PROBED` tasks, one a line; empty where
            no environment was asked. Ids alone do not tell one shop's goals from another's.
    """

    env_id: str
    split: str
    task_ids: tuple[str, ...]
    instructions: str = ""

    def __post_init__(self) -> None:
        if not self.task_ids:
            raise PanelError(f"A panel needs at least one task; {self.env_id} split {self.split!r} gave none.")
        if len(set(self.task_ids)) != len(self.task_ids):
            raise PanelError("Expected each task once in an evaluation set, got a task id twice.")

    def __len__(self) -> int:
        return len(self.task_ids)

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the task ids, in their order, one a line."""
        return text_digest("\n".join(self.task_ids)).hex()

    def protocol(self) -> dict[str, Any]:
        """The evaluation set's part of an evaluation's protocol."""
        return {
            "env": self.env_id,
            "split": self.split,
            "num_tasks": len(self),
            "panel_sha256": self.digest,
            "instructions_sha256": self.instructions,
        }

    @classmethod
    def choose(
        cls, env_id: str, split: str, tasks: Sequence[str], num_tasks: int | None = None, seed: int = 0
    ) -> Panel:
        """Choose ``num_tasks`` of ``tasks`` (``None``: all) by ascending SHA-256 of seed and task id.

        The choice depends on no random generator and not on the order of ``tasks``, so it is the same on every machine;
        a smaller evaluation set of the same seed is the beginning of a larger one.

        Raises:
            PanelError: fewer tasks than asked for, or ``num_tasks`` below 1.
        """
        ids = [str(task) for task in tasks]
        if num_tasks is not None and not 1 <= num_tasks <= len(ids):
            raise PanelError(f"Asked for {num_tasks} tasks; split {split!r} of {env_id} has {len(ids)}.")
        ranked = sorted(ids, key=lambda task: text_digest(f"{seed}\n{task}"))
        return cls(env_id, split, tuple(ranked[:num_tasks]))

    @classmethod
    def from_entry(cls, entry: EnvironmentEntry, num_tasks: int | None = None, seed: int = 0) -> Panel:
        """Choose from what the environment lists for the entry's split; see :meth:`choose`."""
        panel = cls.choose(entry.env_id, entry.split, entry.tasks(), num_tasks, seed)
        return replace(panel, instructions=instructions_digest(entry, panel.task_ids))


def instructions_digest(entry: EnvironmentEntry, task_ids: Sequence[str]) -> str:
    """Digest of the environment's instructions, as :attr:`Panel.instructions` holds it.

    Raises:
        EnvironmentFaultError: the environment fails on one of the tasks.
    """
    # The command line's help knows the evaluation sets by name, and shall not wait for Gymnasium and Ray.
    from trial_ray.environments.guarded import GuardedEnv

    with closing(GuardedEnv(entry)) as env:
        asked = [env.reset(task, seed=0).task for task in task_ids[:PROBED]]
    return text_digest("\n".join(asked)).hex()


SIZES: dict[str, int | None] = {"quick": 32, "standard": 256, "full": None}
"""Evaluation sets that are a number of tasks of whatever split; None is every task."""
FOLDER = Path(__file__).parent / "panels"
SEED = 0
"""Chooses the tasks of evaluation sets that are not committed."""


def panel_names() -> list[str]:
    """Every name that :func:`choose_panel` knows."""
    return [*SIZES, *sorted(file.stem for file in FOLDER.glob("*.json"))]


def choose_panel(entry: EnvironmentEntry, panel: str | int = "full") -> Panel:
    """The tasks to play, the same ones on every machine.

    Args:
        entry: the environment, with the split in its keyword arguments.
        panel: one of :func:`panel_names`, or a number of tasks.

    Raises:
        PanelError: the evaluation set belongs to another environment or split, or the data set at hand is another one than the
            evaluation set was made from.
    """
    if isinstance(panel, int) or panel in SIZES:
        return Panel.from_entry(entry, panel if isinstance(panel, int) else SIZES[panel], seed=SEED)
    committed = read_panel(panel)
    if (committed.env_id, committed.split) != (entry.env_id, entry.split):
        raise PanelError(
            f"Panel {panel!r} is of {committed.env_id} split {committed.split!r}; asked for {entry.env_id} split "
            f"{entry.split!r}."
        )
    missing = sorted(set(committed.task_ids) - set(entry.tasks()))
    if missing:
        raise PanelError(
            f"The installed data lack {len(missing)} of the {len(committed)} tasks of panel {panel!r}, for example "
            f"{missing[0]!r}; they are another release than the panel's."
        )
    found = instructions_digest(entry, committed.task_ids)
    if found != committed.instructions:
        raise PanelError(
            f"The installed data differ from the data of panel {panel!r}: equal ids have other instructions (digest "
            f"{found[:12]}, expected {committed.instructions[:12]}). Choose --panel full or --episodes N instead."
        )
    return committed


def read_panel(name: str) -> Panel:
    """A committed evaluation set.

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
