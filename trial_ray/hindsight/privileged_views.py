"""What a method's second view of a turn shows besides the prompt, by name.

All views go to the same place, the end of the user's message, so that both views share the prompt's tokens up to there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trial_ray.hindsight.outcome_view import OutcomeView, outcome_view
from trial_ray.hindsight.skills import SKILLS


@dataclass(frozen=True, slots=True)
class Moment:
    """One turn, as the views see it.

    Attributes:
        environment: id of the environment.
        family: the task's family.
        outcome: what the environment answered to the action.
        terminal: the environment ended the episode with this turn (not: a limit did).
        success: whether the episode was won.
    """

    environment: str
    family: str
    outcome: str
    terminal: bool
    success: bool


def _outcome(moment: Moment) -> OutcomeView:
    return outcome_view(moment.outcome, terminal=moment.terminal, success=moment.success)


def _feedback(moment: Moment) -> OutcomeView:
    answer = moment.outcome.strip() or "(nothing)"
    return OutcomeView(f"Immediate feedback of the environment: {answer}\nNow solve the task.")


def _skill(moment: Moment) -> OutcomeView:
    advice = SKILLS[moment.environment]
    return OutcomeView(f"Advice for this kind of task: {advice.get(moment.family, advice[''])}")


VIEWS: dict[str, Callable[[Moment], OutcomeView]] = {"outcome": _outcome, "feedback": _feedback, "skill": _skill}


def privileged_view(name: str, moment: Moment) -> OutcomeView:
    """The view of one turn.

    Raises:
        KeyError: no view has that name, or the environment does not offer it (see :func:`offered_views`).
    """
    return VIEWS[name](moment)


def offered_views(environment: str) -> list[str]:
    """Names of the views that an environment offers: advice only where it was written."""
    return [name for name in VIEWS if name != "skill" or environment in SKILLS]
