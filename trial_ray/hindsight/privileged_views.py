"""What a method's second view of a turn shows besides the prompt, by name.

All views go to the same position, the end of the user's message, so that both views share the prompt's tokens up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trial_ray.errors import ConfigError
from trial_ray.hindsight.outcome_view import OutcomeView, outcome_view


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


def _outcome(context: TurnContext) -> OutcomeView:
    return outcome_view(context.outcome, terminal=context.terminal, success=context.success)


def _feedback(context: TurnContext) -> OutcomeView:
    answer = context.outcome.strip() or "(nothing)"
    return OutcomeView(f"Immediate feedback of the environment: {answer}\nNow solve the task.")


def _skill(context: TurnContext) -> OutcomeView:
    advice = context.skills.get(context.family) or context.skills.get("")
    if advice is None:
        raise ConfigError(
            f"The 'skill' view needs advice, but the adapter of {context.environment} has none. Choose another privileged_view."
        )
    return OutcomeView(f"Advice for this kind of task: {advice}")


def _solution(context: TurnContext) -> OutcomeView:
    if not context.solution:
        raise ConfigError(
            f"The 'solution' view needs environments that know one (their `walkthrough`); {context.environment} gave none "
            "for a task. Choose another privileged_view."
        )
    return OutcomeView(f"Actions that solve the task from its beginning: {', '.join(context.solution)}")


VIEWS: dict[str, Callable[[TurnContext], OutcomeView]] = {
    "outcome": _outcome,
    "feedback": _feedback,
    "skill": _skill,
    "solution": _solution,
}


def privileged_view(name: str, context: TurnContext) -> OutcomeView:
    """The view of one turn.

    Raises:
        KeyError: no view has that name.
        ConfigError: the environment gave no solution, or there is no advice.
    """
    return VIEWS[name](context)
