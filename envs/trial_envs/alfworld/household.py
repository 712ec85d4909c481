"""Receptacles and objects of each room, possible contents of receptacles, and objects that can be cleaned, heated or cooled.

The tables of this module are from the official ALFWorld games, without rooms and receptacles that no generated game needs.
"""

from __future__ import annotations

from dataclasses import dataclass

SINK, MICROWAVE, FRIDGE = "SinkBasin", "Microwave", "Fridge"
LAMPS = ("DeskLamp", "FloorLamp")


def _kinds(*words: str) -> frozenset[str]:
    return frozenset(" ".join(words).split())


OPENABLE = _kinds("Cabinet Drawer Fridge Microwave Safe")

CLEANABLE = _kinds(
    "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce",
    "Mug Pan Plate Pot Potato SoapBar Spatula Spoon Tomato",
)
HEATABLE = _kinds("Apple Bread Cup Egg Mug Plate Potato Tomato")
COOLABLE = _kinds("Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle")
SLICEABLE = _kinds("Apple Bread Egg Lettuce Potato Tomato")

_FOOD = "Apple Bread Egg Lettuce Potato Tomato"
_COOKWARE = "Bowl Cup Kettle Mug Pan Plate Pot"
_CUTLERY = "ButterKnife Fork Knife Ladle Spatula Spoon"
_SHAKERS = "PepperShaker SaltShaker"
_PAPER = "Book Newspaper"
_SMALL = "CellPhone CreditCard KeyChain Pen Pencil RemoteControl Watch"
_BATH = "Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle ToiletPaper"
_DECORATION = "Candle Statue TissueBox Vase"
_SEAT = "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl"

CONTAINS: dict[str, frozenset[str]] = {
    "ArmChair": _kinds(_SEAT, "Cloth"),
    "BathtubBasin": _kinds("Cloth DishSponge HandTowel SoapBar"),
    "Bed": _kinds("BaseballBat BasketBall Book CellPhone Laptop Pillow TennisRacket"),
    "Cabinet": _kinds(
        _COOKWARE, _BATH, _SHAKERS, _PAPER, "Box CD Candle Glassbottle Ladle Plunger TissueBox Vase WineBottle"
    ),
    "CoffeeMachine": _kinds("Mug"),
    "CoffeeTable": _kinds(
        _PAPER, _DECORATION, "Bowl Box CellPhone CreditCard KeyChain Laptop Pen Pencil Plate RemoteControl Watch"
    ),
    "CounterTop": _kinds(
        *(_FOOD, _COOKWARE, _CUTLERY, _SHAKERS, _BATH, _DECORATION, "AlarmClock Book CD CellPhone CreditCard"),
        "Glassbottle KeyChain Laptop Pen Pencil RemoteControl WineBottle",
    ),
    "Desk": _kinds(
        _SMALL, "AlarmClock BasketBall Book Bowl Box CD Cloth Laptop Mug Statue TennisRacket TissueBox Vase"
    ),
    "DiningTable": _kinds(
        *(_FOOD, _COOKWARE, _CUTLERY, _SHAKERS, _SMALL, _PAPER, _DECORATION, "AlarmClock BaseballBat BasketBall Box"),
        "CD Cloth DishSponge Glassbottle Laptop SoapBottle SprayBottle TennisRacket WineBottle",
    ),
    "Drawer": _kinds(
        *(_SMALL, _SHAKERS, _PAPER, "ButterKnife Fork Knife Ladle Spatula Spoon CD Candle Cloth DishSponge HandTowel"),
        "SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
    ),
    "Dresser": _kinds(
        *(_SMALL, _PAPER, _DECORATION, "AlarmClock BasketBall Bowl Box CD Cloth Laptop Mug Plate SprayBottle"),
        "TennisRacket ToiletPaper",
    ),
    "Fridge": _kinds(_FOOD, "Bowl Cup Glassbottle Mug Pan Plate Pot WineBottle"),
    "GarbageCan": _kinds(
        _FOOD, "CD Cloth DishSponge HandTowel Newspaper Pen Pencil SoapBar SoapBottle SprayBottle TissueBox",
        "ToiletPaper WineBottle",
    ),
    "Microwave": _kinds("Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato"),
    "Ottoman": _kinds(_SEAT),
    "Safe": _kinds("CD CellPhone CreditCard KeyChain Statue Vase Watch"),
    "Shelf": _kinds(
        *(_SHAKERS, _PAPER, _DECORATION, _BATH, "AlarmClock Bowl Box CD CellPhone CreditCard Cup Glassbottle Kettle"),
        "KeyChain Mug Pen Pencil Plate Pot RemoteControl Watch WineBottle",
    ),
    "SideTable": _kinds(
        *(_FOOD, _SMALL, _PAPER, _DECORATION, _BATH, _SHAKERS, "AlarmClock BaseballBat BasketBall Bowl Box CD Cup"),
        "ButterKnife Fork Knife Spatula Spoon Kettle Laptop Mug Pan Plate Pot TennisRacket WineBottle",
    ),
    SINK: _kinds(
        _COOKWARE, _CUTLERY, "Apple Cloth DishSponge Egg Glassbottle HandTowel Lettuce Potato SoapBar Tomato"
    ),
    "Sofa": _kinds(_SEAT),
    "StoveBurner": _kinds("Kettle Pan Pot"),
    "Toilet": _kinds("Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper"),
}  # fmt: skip
"""Type of a receptacle -> types of objects that it can contain."""


@dataclass(frozen=True)
class Room:
    """A kind of room."""

    name: str
    scenes: range
    """Numbers of the floor plans of this kind of room."""
    receptacles: tuple[str, ...]
    """Types of receptacles that the room may have."""
    objects: tuple[str, ...]
    """Types of objects that the room may have."""
    lamp: str | None = None
    """Type of the lamp in this kind of room; ``None`` if it has no lamp."""
    repeatable: tuple[str, ...] = ()
    """Types of receptacles that may occur several times in a room."""


def _listed(*words: str) -> tuple[str, ...]:
    return tuple(" ".join(words).split())


KITCHEN = Room(
    "kitchen",
    range(1, 31),
    _listed(
        "CounterTop DiningTable SinkBasin Fridge Microwave Cabinet Drawer GarbageCan StoveBurner Shelf CoffeeMachine",
        "SideTable",
    ),
    _listed(_FOOD, _COOKWARE, _CUTLERY, _SHAKERS, "DishSponge Glassbottle SoapBottle WineBottle"),
    repeatable=("Cabinet", "Drawer", "CounterTop", "StoveBurner", "Shelf"),
)
LIVING_ROOM = Room(
    "living room",
    range(201, 231),
    _listed("Sofa CoffeeTable ArmChair SideTable Drawer GarbageCan Dresser Shelf Cabinet Ottoman"),
    _listed(_SEAT, "Statue TissueBox Vase Watch"),
    lamp="DeskLamp",
    repeatable=("Drawer", "ArmChair", "SideTable", "Shelf", "Cabinet"),
)
BEDROOM = Room(
    "bedroom",
    range(301, 331),
    _listed("Bed Desk SideTable Dresser Drawer Shelf GarbageCan ArmChair Safe"),
    _listed(_SMALL, "AlarmClock BasketBall Book Bowl Box CD Laptop Mug Pillow Statue TennisRacket TissueBox"),
    lamp="DeskLamp",
    repeatable=("Drawer", "Shelf", "SideTable"),
)
BATHROOM = Room(
    "bathroom",
    range(401, 431),
    _listed("CounterTop SinkBasin Toilet Cabinet Drawer GarbageCan BathtubBasin Shelf SideTable"),
    _listed(_BATH, "Candle TissueBox"),
    repeatable=("Cabinet", "Drawer", "Shelf"),
)
ROOMS = (KITCHEN, LIVING_ROOM, BEDROOM, BATHROOM)


def room_of(scene: int) -> Room | None:
    """Return the kind of room of a floor plan; ``None`` if no kind has a floor plan with this number."""
    return next((room for room in ROOMS if scene in room.scenes), None)
