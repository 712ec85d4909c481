"""A panel: a fixed list of tasks, chosen alike on every machine, with a digest that tells two panels apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trial_ray.errors import UserInputError
from trial_ray.rollout.stored_text import text_digest

if TYPE_CHECKING:
    from trial_ray.environments.entry import EnvironmentEntry

PROBED = 2


class PanelError(UserInputError):
    """A panel cannot be made or read."""


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
            raise PanelError("A panel holds each task once; found a task id twice.")

    def __len__(self) -> int:
        return len(self.task_ids)

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of the task ids, in their order, one a line."""
        return text_digest("\n".join(self.task_ids)).hex()

    def protocol(self) -> dict[str, Any]:
        """The panel's part of an evaluation's protocol."""
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
        a smaller panel of the same seed is the beginning of a larger one.

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
    """What :attr:`Panel.instructions` holds, asked of the environment.

    Raises:
        EnvironmentFaultError: the environment fails on one of the tasks.
    """
    # The command line's help knows the panels by name, and shall not wait for Gymnasium and Ray.
    from trial_ray.environments.guarded_env import GuardedEnv

    env = GuardedEnv(entry)
    try:
        asked = [env.reset(task, seed=0).task for task in task_ids[:PROBED]]
    finally:
        env.close()
    return text_digest("\n".join(asked)).hex()
