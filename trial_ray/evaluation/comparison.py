"""The paired comparison of two evaluations of the same tasks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trial_ray.errors import UserInputError
from trial_ray.evaluation.intervals import mcnemar_exact, paired_difference_interval
from trial_ray.evaluation.results import EvaluationResult, protocol_difference


class ComparisonError(UserInputError):
    """Two evaluations cannot be compared: other tasks, another protocol, or nothing in common to count."""


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two evaluations of the same tasks, task by task.

    Attributes:
        pairs: tasks counted; ``excluded`` tasks, which an infrastructure error ended in either evaluation, are not.
        before: success rate before, over the counted tasks.
        after: success rate after, over the counted tasks.
        gained: tasks solved only after.
        lost: tasks solved only before.
        difference: ``after - before``.
        interval: 95 % interval of the difference (:func:`paired_difference_interval`).
        p_value: two-sided exact McNemar test (:func:`mcnemar_exact`).
        excluded: tasks left out.
    """

    pairs: int
    before: float
    after: float
    gained: int
    lost: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    excluded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "interval": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.difference:+.1%} [{low:+.1%}, {high:+.1%}] on the same {self.pairs} tasks "
            f"({self.gained} gained, {self.lost} lost; exact McNemar p = {self.p_value:.2g})"
        )


def paired_comparison(before: EvaluationResult, after: EvaluationResult) -> PairedComparison:
    """Compare two evaluations of the same tasks under the same protocol.

    Raises:
        ComparisonError: the protocols differ, the task lists differ, a task occurs twice (its episodes would not be
            independent), or no task is left to count.
    """
    _require_same_protocol(before.protocol, after.protocol)
    first, second = _by_task(before), _by_task(after)
    if first.keys() != second.keys():
        only_before, only_after = sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())
        raise ComparisonError(
            f"The evaluations hold different tasks: {len(only_before)} only before, {len(only_after)} only after "
            f"(for example {(only_before + only_after)[0]!r}). Evaluate both on the same panel."
        )
    kept = [task for task in first if not (first[task].failed or second[task].failed)]
    if not kept:
        raise ComparisonError("No task was completed in both evaluations, so there is nothing to compare.")
    gained = sum(second[task].success and not first[task].success for task in kept)
    lost = sum(first[task].success and not second[task].success for task in kept)
    rates = [sum(episodes[task].success for task in kept) / len(kept) for episodes in (first, second)]
    return PairedComparison(
        pairs=len(kept),
        before=rates[0],
        after=rates[1],
        gained=gained,
        lost=lost,
        difference=(gained - lost) / len(kept),
        interval=paired_difference_interval(gained, lost, len(kept)),
        p_value=mcnemar_exact(gained, lost),
        excluded=len(first) - len(kept),
    )


def _require_same_protocol(before: dict[str, Any], after: dict[str, Any]) -> None:
    if key := protocol_difference(before, after):
        raise ComparisonError(
            f"The evaluations follow different protocols: {key} is {before.get(key)!r} before and "
            f"{after.get(key)!r} after. Evaluate both in the same way."
        )


def _by_task(result: EvaluationResult) -> dict[str, Any]:
    episodes = {}
    for episode in result.episodes:
        if episode.task_id in episodes:
            raise ComparisonError(
                f"Task {episode.task_id!r} occurs more than once; a paired test needs one episode a task."
            )
        episodes[episode.task_id] = episode
    return episodes
