"""OutcomeView (Eq. 2): what a turn's decision led to, as text for the training-only hindsight context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutcomeView:
    """z_k: the realised consequence of one decision, shared by all tokens of that turn's response.

    Attributes:
        text: the consequence in words; what the environment showed is kept as it is.
    """

    text: str


def outcome_view(outcome: str, *, terminal: bool, success: bool) -> OutcomeView:
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
    if not terminal:
        return OutcomeView(text)
    verdict = f"The episode ended: the task {'succeeded' if success else 'failed'}."
    return OutcomeView(f"{text}\n{verdict}" if text else verdict)
