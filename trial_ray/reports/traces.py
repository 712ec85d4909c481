"""Turn scores and weights of trajectories, as the paper's Figure 3 shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trial_ray.environments.adapter import ACTION_CLASSES

READABLE_TURNS = range(10, 26)
"""Lengths of trajectories that a figure shows well."""


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One decision and what the allocation makes of it.

    Attributes:
        action: as sent to the environment.
        action_class: one of ``environments.adapter.ACTION_CLASSES``; empty where the environment's actions have none.
        score: s_k (Eq. 5), the mean absolute gap of its tokens, in nats.
        weight: w_k (Eq. 6), whose token-weighted mean over the trajectory is one.
        tokens: n_k.
    """

    action: str
    action_class: str
    score: float
    weight: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory, turn by turn."""

    task_id: str
    success: bool
    turns: list[TracedTurn]


def class_means(traces: Sequence[Trace]) -> dict[str, dict[str, float | int | None]]:
    """Mean weight of every class of decision over trajectories, with the standard error over their class means.

    A trajectory without a decision of some class does not count for it. With a single one the error is unknown (``None``).
    """
    summary: dict[str, dict[str, float | int | None]] = {}
    for name in ACTION_CLASSES:
        means = [
            float(np.mean(weights))
            for trace in traces
            if (weights := [turn.weight for turn in trace.turns if turn.action_class == name])
        ]
        if means:
            sem = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
            summary[name] = {"mean": float(np.mean(means)), "sem": sem, "trajectories": len(means)}
    return summary


def readable_trace(traces: Sequence[Trace]) -> Trace:
    """The one to show turn by turn: of readable length, with the most classes of decisions; the first of equals."""

    def rank(trace: Trace) -> tuple[bool, int, int]:
        length = len(trace.turns)
        return (
            length in READABLE_TURNS,
            len({turn.action_class for turn in trace.turns}),
            min(length, READABLE_TURNS[0]),
        )

    return max(traces, key=rank)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Turn weights of one iteration's trajectories.

    Attributes:
        iteration: the training iteration.
        traces: every trajectory that was trained.
    """

    iteration: int
    traces: Sequence[Trace]

    @property
    def shown(self) -> list[Trace]:
        """The successful trajectories, as in the paper's Figure 3; all of them where none succeeded."""
        return [trace for trace in self.traces if trace.success] or list(self.traces)
