"""A panel: a fixed list of tasks, chosen alike on every machine, with a digest that tells two panels apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trial_ray.errors import UserInputError
from trial_ray.experiments.overrides import environment_defaults, environment_keywords, unknown_key

if TYPE_CHECKING:
    import gymnasium


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
        return hashlib.sha256("\n".join(self.task_ids).encode()).hexdigest()

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
        ranked = sorted(ids, key=lambda task: hashlib.sha256(f"{seed}\n{task}".encode()).digest())
        return cls(env_id, split, tuple(ranked[:num_tasks]))

    @classmethod
    def from_env(
        cls, env_id: str, env_config: dict[str, Any], split: str, num_tasks: int | None = None, seed: int = 0
    ) -> Panel:
        """Choose from what the environment lists (``env.unwrapped.tasks(split)``); see :meth:`choose`."""
        panel = cls.choose(env_id, split, list_tasks(env_id, env_config, split), num_tasks, seed)
        return replace(panel, instructions=instructions_digest(env_id, env_config, split, panel.task_ids))


def list_tasks(env_id: str, env_config: dict[str, Any], split: str) -> list[str]:
    """Task ids of a split, in the environment's own fixed order; errors as :func:`open_environment`."""
    env = open_environment(env_id, env_config, split)
    try:
        return [str(task) for task in env.unwrapped.tasks(split)]
    finally:
        env.close()


def instructions_digest(env_id: str, env_config: dict[str, Any], split: str, task_ids: Sequence[str]) -> str:
    """What :attr:`Panel.instructions` holds, asked of the environment; errors as :func:`open_environment`."""
    env = open_environment(env_id, env_config, split)
    try:
        asked = [env.reset(options={"task": task})[1]["task"] for task in task_ids[:PROBED]]
    finally:
        env.close()
    return hashlib.sha256("\n".join(asked).encode()).hexdigest()


def open_environment(env_id: str, env_config: dict[str, Any], split: str) -> gymnasium.Env:
    """Make an environment to look at its tasks.

    Raises:
        PanelError: no such environment is registered.
        ConfigError: the environment does not take a keyword of ``env_config``.
    """
    import gymnasium

    import trial_envs

    trial_envs.register()
    known = environment_keywords(env_id)
    for key in env_config:
        if known and key not in known:
            raise unknown_key(f"env_config.{key}", [f"env_config.{name}" for name in known])
    try:
        return gymnasium.make(env_id, **{**env_config, "split": split}, disable_env_checker=True)
    except gymnasium.error.UnregisteredEnv as error:
        raise PanelError(f"{error} Name a registered environment, such as trial/ALFWorld-v0.") from error


def turn_limit(env_id: str, env_config: dict[str, Any]) -> int | None:
    """Turns after which the environment cuts an episode: the given one, else its constructor's default."""
    limit = env_config.get("max_turns", environment_defaults(env_id).get("max_turns"))
    return limit if isinstance(limit, int) else None
