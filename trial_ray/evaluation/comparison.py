"""Checks that evaluations may be compared or averaged, and paired comparisons of two evaluations of the same tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np

from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult, protocol_difference, successes_by_task
from trial_ray.evaluation.statistics import mcnemar_exact, paired_difference_interval, seed_interval
from trial_ray.files import Json


class ComparisonError(UserInputError):
    """Evaluations cannot be compared or averaged.

    Their tasks or evaluation protocols (all settings besides the policy) differ, or an infrastructure error ended an episode of
    every task.
    """


@dataclass(frozen=True)
class PairedComparison:
    """Paired comparison of two evaluations of the same tasks.

    Attributes:
        pairs: number of counted tasks, those in which no infrastructure error ended an episode of either evaluation.
        before: success rate of the first evaluation over the counted tasks.
        after: success rate of the second evaluation over the counted tasks.
        gained: number of tasks that the second evaluation solved more often.
        lost: number of tasks that the first evaluation solved more often.
        difference: ``after - before``.
        interval: 95 % interval of the difference, by the t-test if :attr:`test` is a t-test, else by
            :func:`paired_difference_interval`.
        p_value: two-sided p-value of :attr:`test`.
        test: name of the test: the exact McNemar test (:func:`mcnemar_exact`) or, if tasks have several episodes and two or more
            tasks are counted, a paired t-test over tasks.
        excluded: number of tasks that are not counted because an infrastructure error ended an episode in either evaluation.
    """

    pairs: int
    before: float
    after: float
    gained: int
    lost: int
    difference: float
    interval: tuple[float, float]
    p_value: float
    test: str
    excluded: int

    def to_dict(self) -> Json:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.difference:+.1%} [{low:+.1%}, {high:+.1%}] on the same {self.pairs} tasks "
            f"({self.gained} gained, {self.lost} lost; {self.test.removesuffix(' test')} p = {self.p_value:.2g})"
        )


def paired_comparison(before: EvaluationResult, after: EvaluationResult) -> PairedComparison:
    """Compare two evaluations of the same tasks under the same protocol.

    Raises:
        ComparisonError: the protocols or the tasks differ, a task lacks episodes, or an infrastructure error ended an episode of
            every task.
    """
    require_same_protocol(before.protocol, after.protocol)
    first, second = _rates(before), _rates(after)
    if first.keys() != second.keys():
        only_before, only_after = sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())
        raise ComparisonError(
            f"The evaluations have different tasks: {len(only_before)} only before, {len(only_after)} only after (for example "
            f"{(only_before + only_after)[0]!r}). Evaluate both on the same evaluation set."
        )
    pairs = [(first[task], second[task]) for task in first]
    completed = [pair for pair in pairs if None not in pair]
    if not completed:
        raise ComparisonError("No task was completed in both evaluations, so there is nothing to compare.")
    rates = np.array(completed)
    differences = rates[:, 1] - rates[:, 0]
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    test = "exact McNemar test"
    interval, p_value = paired_difference_interval(gained, lost, len(completed)), mcnemar_exact(gained, lost)
    if before.rollouts > 1 and (over_tasks := seed_interval(differences)) is not None:
        test, interval, p_value = "paired t-test over tasks", (over_tasks.low, over_tasks.high), over_tasks.p_value
    rate_before, rate_after = rates.mean(0).tolist()
    return PairedComparison(
        len(completed),
        rate_before,
        rate_after,
        gained,
        lost,
        rate_after - rate_before,
        interval,
        p_value,
        test,
        len(pairs) - len(completed),
    )


def success_by_seed(results: Sequence[EvaluationResult]) -> np.ndarray:
    """Return the success rate on each task in each of several evaluations with the same tasks and the same protocol.

    A task is counted in an evaluation only if no infrastructure error ended one of the task's episodes.

    Args:
        results: at least one evaluation.

    Returns:
        Float ``[evaluations, tasks]``, with the counted tasks in the order of the first evaluation.

    Raises:
        ComparisonError: the protocols or the counted tasks differ, a task lacks episodes, or no task is counted.
    """
    require_one_protocol(results)
    rows = [{task: rate for task, rate in _rates(result).items() if rate is not None} for result in results]
    if any(row.keys() != rows[0].keys() for row in rows):
        counts = " and ".join(dict.fromkeys(str(len(row)) for row in rows))
        raise ComparisonError(f"The evaluations did not finish the same tasks ({counts}), so they cannot be averaged.")
    if not rows[0]:
        first = results[0]
        raise ComparisonError(f"No task was played to its end ({first.num_failed} of {len(first.episodes)} failed).")
    return np.array([[row[task] for task in rows[0]] for row in rows], np.float64)


def require_one_protocol(results: Sequence[EvaluationResult]) -> None:
    """Reject evaluations with different protocols, because their episodes cannot be pooled into one rate.

    Raises:
        ComparisonError: the protocols differ.
    """
    for result in results:
        require_same_protocol(results[0].protocol, result.protocol, ("in one", "in another"))


def require_same_protocol(first: Json, second: Json, where: tuple[str, str] = ("before", "after")) -> None:
    """Reject two evaluations with different protocols, because their policies would not be the only cause of a difference.

    Args:
        first: protocol of one evaluation.
        second: protocol of the other evaluation.
        where: phrases that refer to the first and to the second evaluation in the error message.

    Raises:
        ComparisonError: the protocols differ.
    """
    if difference := protocol_difference(first, second, where):
        raise ComparisonError(f"The evaluations have different protocols: {difference}. Evaluate both in the same way.")


def _rates(result: EvaluationResult) -> dict[str, float | None]:
    """Return the success rate by task; ``None`` if an infrastructure error ended one of the task's episodes.

    Raises:
        ComparisonError: a task does not have as many episodes as the protocol requires.
    """
    tasks = successes_by_task(result.episodes)
    for task, successes in tasks.items():
        if len(successes) != result.rollouts:
            raise ComparisonError(
                f"Task {task!r} has {len(successes)} episodes, expected {result.rollouts} of each task."
            )
    failed = {episode.task_id for episode in result.episodes if episode.failed}
    return {task: None if task in failed else fmean(successes) for task, successes in tasks.items()}
