"""A text environment of a user's own that keeps the contract until it is told not to."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Text

TURNS = 3
VALUES = {
    "nan": float("nan"),
    "None": None,
    "5": 5,
    "list": [1],
    "array": np.zeros((2, 2)),
    "nested name": {"form/tags": 1.0},
    "no number": {"form": "good"},
    "nan by name": {"form": float("nan")},
    "too many": {f"r{number}": 0.0 for number in range(33)},
}
"""What ``fault`` may put in place of a value, by the word for it; other words stand for themselves."""


class CountingEnv(gymnasium.Env):
    """Three turns; the last one wins.

    Args:
        split: any.
        fault: name of the method below that spoils every episode; empty for none.
        orders: file that may name the fault of the next episode that begins, in whatever process, which takes it away.
    """

    ENV_ID: ClassVar[str] = "mine/Counting-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, split: str = "train", fault: str = "", orders: str = "") -> None:
        if fault == "creation_raises":
            raise OSError("no such engine\nat all")
        self.observation_space = self.action_space = Text(1000)
        self.fault, self.orders = fault, orders
        self.closed = False
        self.turn, self.task, self.spoilt = 0, "", False

    def tasks(self, split: str | None = None) -> list[str]:
        return ["one", "two", "three", "four"]

    @property
    def walkthrough(self) -> tuple[str, ...]:
        if self.spoilt and self.fault == "walkthrough_raises":
            raise LookupError("no solution")
        return ("count",) * TURNS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.spoilt = self._take_order() if self.orders else True
        self.turn, self.task = 0, options["task"]
        answer = ("You count: 0.", self._info())
        if self.spoilt and self.fault == "reset_raises":
            raise RuntimeError("cannot start")
        self._misbehave("reset")
        return self._spoil("reset", answer)

    def step(self, action):
        self.turn += 1
        won = self.turn == TURNS
        answer = (f"You count: {self.turn}.", float(won), won, False, self._info())
        if self.turn != 2:
            return answer
        if self.spoilt and self.fault == "step_raises":
            raise KeyError("position")
        self._misbehave("step")
        return self._spoil("step", answer)

    def close(self):
        self.closed = True
        if self.fault == "close_hangs":
            time.sleep(1000)

    def _take_order(self) -> bool:
        taken = f"{self.orders}.{os.getpid()}"
        try:
            os.rename(self.orders, taken)
        except FileNotFoundError:
            return False
        self.fault = Path(taken).read_text(encoding="utf-8")
        os.unlink(taken)
        return True

    def _misbehave(self, method: str) -> None:
        """Faults that a process of its own alone survives; each is named after the method, such as ``step_hangs``."""
        fault = self.fault.removeprefix(f"{method}_") if self.spoilt else ""
        if fault == "hangs":
            while True:
                pass
        elif fault == "sleeps":
            time.sleep(1000)
        elif fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exits":
            sys.exit(3)
        elif fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "grows":
            self.grown = [bytearray(10_000_000) for _ in range(1000)]

    def _info(self) -> dict[str, Any]:
        return {
            "task": f"count to {TURNS}",
            "task_id": self.task,
            "family": "counting",
            "admissible_actions": ["count", "wait"],
            "won": self.turn == TURNS,
            "score": self.turn / TURNS,
            "invalid_action": False,
        }

    def _spoil(self, method: str, answer: tuple[Any, ...]) -> Any:
        """``fault`` may read ``step[1]=nan`` (place of the answer) or ``reset.score=nan`` (key of the info)."""
        where, found, value = self.fault.partition("=")
        if not (self.spoilt and found and where.startswith(method)):
            return answer
        value = "x" * 50_000_000 if value == "huge" else VALUES.get(value, value)
        where = where.removeprefix(method)
        if not where:
            return value
        if where.startswith("["):
            parts = list(answer)
            parts[int(where.strip("[]"))] = value
            return tuple(parts)
        return (*answer[:-1], {**answer[-1], where[1:]: value})
