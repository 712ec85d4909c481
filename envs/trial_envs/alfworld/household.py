"""What stands in which room, what fits where, and what may be washed, heated or cooled.

The facts are those that the games of the ALFWorld release state; rooms and furniture that no generated game needs are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

SINK, MICROWAVE, FRIDGE = "SinkBasin", "Microwave", "Fridge"
LAMPS = ("DeskLamp", "FloorLamp")
OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})

CLEANABLE = frozenset(
    [
        "Apple",
        "Bowl",
        "ButterKnife",
        "Cloth",
        "Cup",
        "DishSponge",
        "Egg",
        "Fork",
        "Kettle",
        "Knife",
        "Ladle",
        "Lettuce",
        "Mug",
        "Pan",
        "Plate",
        "Pot",
        "Potato",
        "SoapBar",
        "Spatula",
        "Spoon",
        "Tomato",
    ]
)
HEATABLE = frozenset(["Apple", "Bread", "Cup", "Egg", "Mug", "Plate", "Potato", "Tomato"])
COOLABLE = frozenset(
    ["Apple", "Bowl", "Bread", "Cup", "Egg", "Lettuce", "Mug", "Pan", "Plate", "Pot", "Potato", "Tomato", "WineBottle"]
)
SLICEABLE = frozenset(["Apple", "Bread", "Egg", "Lettuce", "Potato", "Tomato"])

_FOOD = "Apple Bread Egg Lettuce Potato Tomato "
_COOKWARE = "Bowl Cup Kettle Mug Pan Plate Pot "
_CUTLERY = "ButterKnife Fork Knife Ladle Spatula Spoon "
_SHAKERS = "PepperShaker SaltShaker "
_PAPER = "Book Newspaper "
_SMALL = "CellPhone CreditCard KeyChain Pen Pencil RemoteControl Watch "
_BATH = "Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle ToiletPaper "
_DECORATION = "Candle Statue TissueBox Vase "

CONTAINS: dict[str, frozenset[str]] = {
    receptacle: frozenset(objects.split())
    for receptacle, objects in {
        "ArmChair": "Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "BathtubBasin": "Cloth DishSponge HandTowel SoapBar",
        "Bed": "BaseballBat BasketBall Book CellPhone Laptop Pillow TennisRacket",
        "Cabinet": "Book Bowl Box CD Candle Cloth Cup DishSponge Glassbottle HandTowel Kettle Ladle Mug Newspaper Pan "
        "PepperShaker Plate Plunger Pot SaltShaker SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Vase WineBottle",
        "CoffeeMachine": "Mug",
        "CoffeeTable": _PAPER + _DECORATION + "Bowl Box CellPhone CreditCard KeyChain Laptop Pen Pencil Plate "
        "RemoteControl Watch",
        "CounterTop": _FOOD + _COOKWARE + _CUTLERY + _SHAKERS + _BATH + _DECORATION + "AlarmClock Book CD CellPhone "
        "CreditCard Glassbottle KeyChain Laptop Pen Pencil RemoteControl WineBottle",
        "Desk": _SMALL + "AlarmClock BasketBall Book Bowl Box CD Cloth Laptop Mug Statue TennisRacket TissueBox Vase",
        "DiningTable": _FOOD
        + _COOKWARE
        + _CUTLERY
        + _SHAKERS
        + _SMALL
        + _PAPER
        + _DECORATION
        + "AlarmClock BaseballBat "
        "BasketBall Box CD Cloth DishSponge Glassbottle Laptop SoapBottle SprayBottle TennisRacket WineBottle",
        "Drawer": _SMALL + _SHAKERS + _PAPER + _CUTLERY + "CD Candle Cloth DishSponge HandTowel SoapBar SoapBottle "
        "SprayBottle TissueBox ToiletPaper",
        "Dresser": _SMALL
        + _PAPER
        + _DECORATION
        + "AlarmClock BasketBall Bowl Box CD Cloth Laptop Mug Plate SprayBottle "
        "TennisRacket ToiletPaper",
        "Fridge": _FOOD + "Bowl Cup Glassbottle Mug Pan Plate Pot WineBottle",
        "GarbageCan": _FOOD + "CD Cloth DishSponge HandTowel Newspaper Pen Pencil SoapBar SoapBottle SprayBottle "
        "TissueBox ToiletPaper WineBottle",
        "Microwave": "Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato",
        "Ottoman": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "Safe": "CD CellPhone CreditCard KeyChain Statue Vase",
        "Shelf": _SHAKERS
        + _PAPER
        + _DECORATION
        + _BATH
        + "AlarmClock Bowl Box CD CellPhone CreditCard Cup Glassbottle "
        "Kettle KeyChain Mug Pen Pencil Plate Pot RemoteControl Watch WineBottle",
        "SideTable": _FOOD + _CUTLERY + _SMALL + _PAPER + _DECORATION + _BATH + _SHAKERS + "AlarmClock BaseballBat "
        "BasketBall Bowl Box CD Cup Kettle Laptop Mug Plate Pot TennisRacket WineBottle",
        SINK: "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Glassbottle HandTowel Kettle Knife Ladle Lettuce "
        "Mug Pan Plate Pot Potato SoapBar Spatula Spoon Tomato",
        "Sofa": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "StoveBurner": "Kettle Pan Pot",
        "Toilet": "Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper",
    }.items()
}


@dataclass(frozen=True)
class Room:
    """A kind of room."""

    name: str
    scenes: range
    """Numbers of the floor plans of this kind."""
    receptacles: tuple[str, ...]
    """Types of furniture, the usual ones first."""
    objects: tuple[str, ...]
    """Types of things lying about."""
    lamp: str | None = None
    """The lamp that stands here, if any."""
    repeatable: tuple[str, ...] = ()
    """Furniture of which a room may have several."""


KITCHEN = Room(
    "kitchen",
    range(1, 31),
    ("CounterTop", "DiningTable", SINK, FRIDGE, MICROWAVE, "Cabinet", "Drawer", "GarbageCan", "StoveBurner", "Shelf")
    + ("CoffeeMachine", "SideTable"),
    tuple((_FOOD + _COOKWARE + _CUTLERY + _SHAKERS + "DishSponge Glassbottle SoapBottle WineBottle").split()),
    repeatable=("Cabinet", "Drawer", "CounterTop", "StoveBurner", "Shelf"),
)
LIVING_ROOM = Room(
    "living room",
    range(201, 231),
    ("Sofa", "CoffeeTable", "ArmChair", "SideTable", "Drawer", "GarbageCan", "Dresser", "Shelf", "Cabinet", "Ottoman"),
    tuple(
        [
            "Book",
            "Box",
            "CellPhone",
            "CreditCard",
            "KeyChain",
            "Laptop",
            "Newspaper",
            "Pillow",
            "RemoteControl",
            "Statue",
            "TissueBox",
            "Vase",
            "Watch",
        ]
    ),
    lamp="DeskLamp",
    repeatable=("Drawer", "ArmChair", "SideTable", "Shelf", "Cabinet"),
)
BEDROOM = Room(
    "bedroom",
    range(301, 331),
    ("Bed", "Desk", "SideTable", "Dresser", "Drawer", "Shelf", "GarbageCan", "ArmChair", "Safe"),
    tuple((_SMALL + "AlarmClock BasketBall Book Bowl Box CD Laptop Mug Pillow Statue TennisRacket TissueBox").split()),
    lamp="DeskLamp",
    repeatable=("Drawer", "Shelf", "SideTable"),
)
BATHROOM = Room(
    "bathroom",
    range(401, 431),
    ("CounterTop", SINK, "Toilet", "Cabinet", "Drawer", "GarbageCan", "BathtubBasin", "Shelf", "SideTable"),
    tuple((_BATH + "Candle TissueBox").split()),
    repeatable=("Cabinet", "Drawer", "Shelf"),
)
ROOMS = (KITCHEN, LIVING_ROOM, BEDROOM, BATHROOM)


def room_of(scene: int) -> Room | None:
    """The kind of room that a floor plan is."""
    return next((room for room in ROOMS if scene in room.scenes), None)
