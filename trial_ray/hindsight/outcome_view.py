"""OutcomeView (Eq. 2): what a turn's decision led to, as text for the training-only hindsight context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the text of a view, and where both go.

    Attributes:
        lead: opens the text and says what it is.
        close: follows the text.
        in_front: whether both stand in front of the whole prompt; else at the end of the user's message.
    """

    lead: str
    close: str = ""
    in_front: bool = False


OUTCOME = Frame("\n\nOutcome after the reply:\n")


@dataclass(frozen=True, slots=True)
class PrivilegedView:
    """What the second view of a turn shows besides the prompt, shared by all tokens of that turn's response; z_k for an outcome.

    Attributes:
        text: the content in words; what the environment showed is kept as it is.
        frame: around it.
    """

    text: str
    frame: Frame = OUTCOME


def outcome_view(outcome: str, *, terminal: bool, success: bool) -> PrivilegedView:
    """The view of one turn: what the environment answered to it, and the verdict where the answer ended the episode.

    ALFWorld: ``outcome`` is the text rendered after the action; WebShop: the page that the action reached. A terminal
    turn adds the terminal consequence. The last turn of a trajectory that a limit cut short is not terminal: its view
    is only what the environment answered.

    Args:
        outcome: what the environment answered to the action.
        terminal: the environment ended the episode with this turn (not: a limit on turns or tokens did).
        success: whether the task was accomplished; matters on a terminal turn alone.
    """
    text = outcome.strip()
    if terminal:
        verdict = f"The episode ended: the task {'succeeded' if success else 'failed'}."
        text = f"{text}\n{verdict}" if text else verdict
    return PrivilegedView(text)
