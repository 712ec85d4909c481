"""Writes a furnished room and a goal as a PDDL problem of the ALFRED domain."""

from __future__ import annotations

from dataclasses import dataclass, field

from trial_envs.alfworld.families import CLEAN, COOL, HEAT, LOOK, PICK_TWO, TaskName
from trial_envs.alfworld.household import CLEANABLE, CONTAINS, COOLABLE, HEATABLE, LAMPS, OPENABLE, SLICEABLE

START = "loc_bar_0"
"""The agent's first location, the middle of the room."""

_TOOL_TYPES = ("SinkBasin", "Microwave", "Fridge")
_KNIVES = ("Knife", "ButterKnife")
_STATES = {CLEAN: ("cleanable", "isClean"), HEAT: ("heatable", "isHot"), COOL: ("coolable", "isCool")}


@dataclass
class Layout:
    """A furnished room."""

    receptacles: dict[str, str] = field(default_factory=dict)
    """Receptacle id -> its type."""
    objects: dict[str, str] = field(default_factory=dict)
    """Object id -> its type."""
    receptacle_of: dict[str, str] = field(default_factory=dict)
    """Object id -> id of the receptacle that contains it."""

    def add_receptacle(self, kind: str) -> str:
        """Add a receptacle of a type; return its id."""
        number = sum(known == kind for known in self.receptacles.values()) + 1
        stem = kind.removesuffix("Basin")
        suffix = f"_bar_{kind}" if kind.endswith("Basin") else ""
        return self._add(self.receptacles, f"{stem}_bar_{number:02d}{suffix}", kind)

    def add_object(self, kind: str, receptacle: str) -> str:
        """Add an object of a type to a receptacle; return its id."""
        number = sum(known == kind for known in self.objects.values()) + 1
        name = self._add(self.objects, f"{kind}_bar_{number:02d}", kind)
        self.receptacle_of[name] = receptacle
        return name

    @staticmethod
    def _add(known: dict[str, str], name: str, kind: str) -> str:
        known[name] = kind
        return name


def write_problem(name: str, task: TaskName, layout: Layout) -> str:
    """Return the PDDL problem of a task in a furnished room."""
    return f"(define (problem {name})\n(:domain alfred)\n{_objects(layout)}\n{_init(layout)}\n{_goal(task)}\n)\n"


def _objects(layout: Layout) -> str:
    object_types = sorted({*layout.objects.values(), *_KNIVES})
    receptacle_types = sorted({*layout.receptacles.values(), *_TOOL_TYPES})
    lines = ["agent1 - agent", f"{START} - location"]
    lines += [f"{kind}Type - otype" for kind in object_types]
    lines += [f"{kind}Type - rtype" for kind in receptacle_types]
    lines += [f"{name} - object" for name in layout.objects]
    lines += [f"{name} - receptacle" for name in layout.receptacles]
    lines += [f"{_location(layout, name)} - location" for name in layout.receptacles]
    return "(:objects\n" + "\n".join(lines) + "\n)"


def _location(layout: Layout, receptacle: str) -> str:
    return f"loc_bar_{list(layout.receptacles).index(receptacle) + 1}"


def _init(layout: Layout) -> str:
    facts = [f"(atLocation agent1 {START})"]
    for name, kind in layout.receptacles.items():
        facts.append(f"(receptacleType {name} {kind}Type)")
        facts.append(f"(receptacleAtLocation {name} {_location(layout, name)})")
        if kind in OPENABLE:
            facts.append(f"(openable {name})")
    for name, kind in layout.objects.items():
        receptacle = layout.receptacle_of[name]
        facts.append(f"(objectType {name} {kind}Type)")
        facts.append(f"(inReceptacle {name} {receptacle})")
        facts.append(f"(objectAtLocation {name} {_location(layout, receptacle)})")
        facts += [f"({quality} {name})" for quality in _qualities(kind)]
    present = sorted(set(layout.objects.values()))
    for receptacle in sorted(set(layout.receptacles.values())):
        facts += [f"(canContain {receptacle}Type {kind}Type)" for kind in present if kind in CONTAINS[receptacle]]
    return "(:init\n" + "\n".join(facts) + "\n)"


def _qualities(kind: str) -> list[str]:
    if kind in LAMPS:
        return ["toggleable"]
    qualities = ["pickupable"]
    for quality, kinds in (
        ("cleanable", CLEANABLE),
        ("heatable", HEATABLE),
        ("coolable", COOLABLE),
        ("sliceable", SLICEABLE),
    ):
        if kind in kinds:
            qualities.append(quality)
    return qualities


def _goal(task: TaskName) -> str:
    kind, target = f"{task.object_type}Type", f"{task.target}Type"
    if task.family == LOOK:
        lit = (
            f"(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {target}) "
            "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
        )
        held = f"(exists (?o - object ?a - agent) (and (objectType ?o {kind}) (holds ?a ?o)))"
        return f"(:goal (and {lit} {held}))"
    placed = f"(objectType ?o {kind}) (receptacleType ?r {target}) (inReceptacle ?o ?r)"
    if task.family in _STATES:
        quality, state = _STATES[task.family]
        placed += f" ({quality} ?o) ({state} ?o)"
    if task.family == PICK_TWO:
        placed += (
            f" (exists (?o2 - object) (and (not (= ?o ?o2)) (objectType ?o2 {kind}) "
            f"(receptacleType ?r {target}) (inReceptacle ?o2 ?r)))"
        )
    return f"(:goal (and (exists (?r - receptacle) (exists (?o - object) (and {placed})))))"
