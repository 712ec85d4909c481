"""A text environment that repeats each action; the task's number wins, and the engine does not understand an empty action."""

from __future__ import annotations

from collections.abc import Sequence

from trial_envs.core import Outcome, TextEnv


class EchoEnv(TextEnv):
    """Tasks are numbers; ``freed`` counts calls of ``_free``."""

    def __init__(self, max_turns: int = 4, render_mode: str | None = None) -> None:
        super().__init__("numbers", max_turns, render_mode)
        self.freed = 0

    def tasks(self, split: str | None = None) -> Sequence[str]:
        return [str(number) for number in range(50)]

    def family(self, task_id: str) -> str:
        return "even" if int(task_id) % 2 == 0 else "odd"

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        self.wanted = task_id
        return f"say {task_id}", Outcome(f"Ünïcode {task_id}", ("1", "2"))

    def _advance(self, action: str) -> Outcome:
        won = action == self.wanted
        return Outcome(f"{action}!", ("1",), float(won), float(won), won, won, invalid_action=action == "")

    def _free(self) -> None:
        self.freed += 1
