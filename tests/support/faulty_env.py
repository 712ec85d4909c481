"""A text environment of a user's own that keeps the contract until it is told not to."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

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
    "too many": {f"r{number}": 0.0 for number in range(33)},
}
"""What ``fault`` may put in place of a value, by the word for it; other words stand for themselves."""
RAISED = {
    "creation": (OSError, "no such engine\nat all"),
    "walkthrough": (LookupError, "no solution"),
    "reset": (RuntimeError, "cannot start"),
    "step": (KeyError, "position"),
}
"""What ``creation_raises``, ``walkthrough_raises`` and so on raise, and with which message."""


class CountingEnv(gymnasium.Env):
    """Three turns; the last one wins.

    Args:
        split: any.
        fault: name of the method below that spoils every episode; empty for none.
        orders: file that may name the fault of the next episode that begins, in whatever process, which takes it away.
    """

    ENV_ID = "mine/Counting-v0"
    observation_space = action_space = Text(1000)

    def __init__(self, split="train", fault="", orders=""):
        self.fault, self.orders, self.spoilt = fault, orders, True
        self._misbehave("creation")

    def tasks(self, split=None):
        return ["one", "two", "three", "four"]

    @property
    def walkthrough(self):
        self._misbehave("walkthrough")
        return ("count",) * TURNS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.spoilt = self._take_order() if self.orders else True
        self.turn, self.task = 0, options["task"]
        self._misbehave("reset")
        return self._spoil("reset", ("You count: 0.", self._info()))

    def step(self, action):
        self.turn += 1
        won = self.turn == TURNS
        answer = (f"You count: {self.turn}.", float(won), won, False, self._info())
        if self.turn != 2:
            return answer
        self._misbehave("step")
        return self._spoil("step", answer)

    def close(self):
        self._misbehave("close")

    def _take_order(self):
        with suppress(FileNotFoundError):
            taken = Path(self.orders).rename(f"{self.orders}.{os.getpid()}")
            self.fault = taken.read_text()
            taken.unlink()
            return True
        return False

    def _misbehave(self, method):
        """Errors, and faults that a process of its own alone survives; each is named after the method, as in ``step_hangs``."""
        match self.fault.removeprefix(f"{method}_") if self.spoilt else "":
            case "raises":
                error, told = RAISED[method]
                raise error(told)
            case "hangs":
                while True:
                    pass
            case "sleeps":
                time.sleep(1000)
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exits":
                sys.exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "grows":
                self.grown = [bytearray(10_000_000) for _ in range(1000)]

    def _info(self):
        return {
            "task": f"count to {TURNS}",
            "task_id": self.task,
            "family": "counting",
            "admissible_actions": ["count", "wait"],
            "won": self.turn == TURNS,
            "score": self.turn / TURNS,
            "invalid_action": False,
        }

    def _spoil(self, method, answer):
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
