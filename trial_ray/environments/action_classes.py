"""Kinds of decisions, told from the action's text: the rows of an allocation trace."""

from __future__ import annotations

import re

from trial_ray.rollout.trajectory import Trajectory

ACQUISITION, PLACEMENT, NAVIGATION = "acquisition", "placement", "navigation"
COMPLETION, OTHER = "completion", "inspection/other"
CLASSES = (ACQUISITION, PLACEMENT, NAVIGATION, COMPLETION, OTHER)

# The first pattern that matches an action says its class. WebShop's are the analogues: opening a product is acquiring
# it, choosing an option puts together what is bought, searching and turning pages is moving around. Product ids of
# generated shops begin with G.
_PATTERNS = {
    "trial/ALFWorld-v0": (
        (r"take ", ACQUISITION),
        (r"(move|put) ", PLACEMENT),
        (r"go to ", NAVIGATION),
    ),
    "trial/WebShop-v0": (
        (r"search\[", NAVIGATION),
        (r"click\[(next >|< prev|back to search)\]$", NAVIGATION),
        (r"click\[(description|features|reviews|attributes|buy now)\]$", OTHER),
        (r"click\[(?=\w{10}\])[bg]\w*\d\w*\]$", ACQUISITION),
        (r"click\[.+\]$", PLACEMENT),
    ),
}


def action_class(env_id: str, action: str) -> str:
    """Class of an action that did not end its episode; of an unknown environment, every one is ``inspection/other``."""
    text = action.strip().lower()
    patterns = _PATTERNS.get(env_id, ())
    return next((name for pattern, name in patterns if re.match(pattern, text)), OTHER)


def turn_classes(env_id: str, trajectory: Trajectory) -> list[str]:
    """Class of every turn; the one that ended the episode, unless a limit did, is its completion."""
    classes = [action_class(env_id, turn.action) for turn in trajectory.turns]
    if classes and trajectory.ended == "terminated":
        classes[-1] = COMPLETION
    return classes
