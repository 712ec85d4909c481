"""What a method's second view of a turn shows besides the prompt, by name.

Lead, close and place are those of the method that a view comes from, in this package's own words; docs/methods.md names the
source of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trial_ray.errors import ConfigError
from trial_ray.hindsight.outcome_view import OUTCOME, Frame, PrivilegedView, outcome_view


@dataclass(frozen=True, slots=True)
class TurnContext:
    """One turn, as the views see it.

    Attributes:
        environment: id of the environment.
        family: the task's family.
        outcome: what the environment answered to the action.
        terminal: the environment ended the episode with this turn (not: a limit did).
        success: whether the episode was won.
        solution: actions that solve the task from its beginning; empty where the environment knows none.
        skills: advice by family, under ``""`` for all others; empty where there is none.
    """

    environment: str
    family: str
    outcome: str
    terminal: bool
    success: bool
    solution: tuple[str, ...] = ()
    skills: Mapping[str, str] = field(default_factory=dict)


FRAMES: dict[str, Frame] = {
    "outcome": OUTCOME,
    "feedback": Frame(
        "\n\nThe environment's immediate answer to this step:\n", "\n\nNow solve the task as it should be solved.\n"
    ),
    "skill": Frame("[Privileged advice on tasks of this kind]\n", "\n\n", in_front=True),
    "solution": Frame(
        "\n\nA solution of this task for reference, as actions from its beginning:\n",
        "\n\nSee why each of its steps is taken, then reach the same end by a reasoning of your own.\n",
    ),
}


def _outcome(context: TurnContext) -> PrivilegedView:
    return outcome_view(context.outcome, terminal=context.terminal, success=context.success)


def _feedback(context: TurnContext) -> PrivilegedView:
    answer = context.outcome.strip()
    return PrivilegedView(answer, FRAMES["feedback"] if answer else Frame(""))


def _skill(context: TurnContext) -> PrivilegedView:
    advice = context.skills.get(context.family) or context.skills.get("")
    if advice is None:
        raise ConfigError(
            f"The 'skill' view needs advice, but the adapter of {context.environment} has none. Choose another privileged_view."
        )
    return PrivilegedView(advice, FRAMES["skill"])


def _solution(context: TurnContext) -> PrivilegedView:
    if not context.solution:
        raise ConfigError(
            f"The 'solution' view needs environments that know one (their `walkthrough`); {context.environment} gave none "
            "for a task. Choose another privileged_view."
        )
    return PrivilegedView(", ".join(context.solution), FRAMES["solution"])


VIEWS: dict[str, Callable[[TurnContext], PrivilegedView]] = {
    "outcome": _outcome,
    "feedback": _feedback,
    "skill": _skill,
    "solution": _solution,
}


def privileged_view(name: str, context: TurnContext) -> PrivilegedView:
    """The view of one turn.

    Raises:
        KeyError: no view has that name.
        ConfigError: the environment gave no solution, or there is no advice.
    """
    return VIEWS[name](context)
