"""The six families of ALFWorld tasks, and the parts of a game's directory name."""

from __future__ import annotations

import re
from dataclasses import dataclass

PICK = "pick_and_place_simple"
LOOK = "look_at_obj_in_light"
CLEAN = "pick_clean_then_place_in_recep"
HEAT = "pick_heat_then_place_in_recep"
COOL = "pick_cool_then_place_in_recep"
PICK_TWO = "pick_two_obj_and_place"

FAMILIES = (PICK, LOOK, CLEAN, HEAT, COOL, PICK_TWO)

TASK_PREFIX = "Your task is to: "

_SCENE = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class TaskName:
    """The parts of a game's directory name, ``<family>-<object>-None-<target>-<scene>``."""

    family: str
    """One of :data:`FAMILIES`."""
    object_type: str
    """Type of the object to find, in CamelCase: ``SoapBar``."""
    target: str
    """Type of the target receptacle; in the family :data:`LOOK`, the type of the lamp."""
    scene: int
    """Number of the floor plan; its hundreds digit gives the kind of room."""

    def __str__(self) -> str:
        return f"{self.family}-{self.object_type}-None-{self.target}-{self.scene}"


def parse_name(name: str) -> TaskName | None:
    """Parse a game's directory name; return ``None`` if its family is unknown or its object is sliced."""
    parts = name.split("-")
    if len(parts) != 5 or parts[0] not in FAMILIES or parts[2] not in ("None", "") or not _SCENE.fullmatch(parts[4]):
        return None
    if "Sliced" in name:
        return None
    return TaskName(parts[0], parts[1], parts[3], int(parts[4]))


def family_of(task_id: str) -> str:
    """Return the family of a task id ``<name>/<trial>``; an empty string if the family is not one of ALFWorld's six."""
    return task_id.split("-", 1)[0] if task_id.split("-", 1)[0] in FAMILIES else ""
