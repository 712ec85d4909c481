"""A text environment of a user's own that keeps the contract until it is told not to."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Text

TURNS = 3
VALUES = {
    "nan": float("nan"),
    "inf": float("inf"),
    "None": None,
    "5": 5,
    "bytes": b"x",
    "list": [1],
    "array": np.zeros((2, 2)),
}
"""What ``fault`` may put in place of a value, by the word for it; other words stand for themselves."""


class CountingEnv(gymnasium.Env):
    """Three turns; the last one wins.

    Args:
        split: any.
        fault: name of the method below that spoils an episode; empty for none.
        faulty_episode: which of this process's episodes is spoilt, from 1; 0 spoils every one.
    """

    ENV_ID: ClassVar[str] = "mine/Counting-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    episodes: ClassVar[Counter[int]] = Counter()
    """Episodes begun, by process."""

    def __init__(self, split: str = "train", fault: str = "", faulty_episode: int = 0) -> None:
        if fault == "creation_raises":
            raise OSError("no such engine\nat all")
        self.observation_space = self.action_space = Text(1000)
        self.fault, self.faulty_episode = fault, faulty_episode
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
        self.episodes[os.getpid()] += 1
        self.spoilt = self.faulty_episode in (0, self.episodes[os.getpid()])
        self.turn, self.task = 0, options["task"]
        answer = ("You count: 0.", self._info())
        if self.spoilt and self.fault == "reset_raises":
            raise RuntimeError("cannot start")
        return self._spoil("reset", answer)

    def step(self, action):
        self.turn += 1
        if self.spoilt and self.fault == "step_raises" and self.turn == 2:
            raise KeyError("position")
        won = self.turn == TURNS
        answer = (f"You count: {self.turn}.", float(won), won, False, self._info())
        return self._spoil("step", answer) if self.turn == 2 else answer

    def close(self):
        self.closed = True
        if self.fault == "close_raises":
            raise RuntimeError("cannot close")

    def _info(self) -> dict[str, Any]:
        won = self.turn == TURNS
        return {
            "task": f"count to {TURNS}",
            "task_id": self.task,
            "family": "counting",
            "admissible_actions": ["count", "wait"],
            "won": won,
            "score": self.turn / TURNS,
            "invalid_action": False,
        }

    def _spoil(self, method: str, answer: tuple[Any, ...]) -> Any:
        """``fault`` may read ``step[1]=nan`` (place of the answer) or ``reset.score=nan`` (key of the info)."""
        where, found, value = self.fault.partition("=")
        if not (self.spoilt and found and where.startswith(method)):
            return answer
        value = VALUES.get(value, value)
        where = where.removeprefix(method)
        if not where:
            return value
        if where.startswith("["):
            parts = list(answer)
            parts[int(where.strip("[]"))] = value
            return tuple(parts)
        info = dict(answer[-1])
        if value == "missing":
            del info[where[1:]]
        else:
            info[where[1:]] = value
        return (*answer[:-1], info)
