"""Kinds of products of the generated shops, with their attributes, options and prices."""

from __future__ import annotations

from dataclasses import dataclass

_CLOTH_SIZES = ("x-small", "small", "medium", "large", "x-large", "xx-large", "3x-large")
_SHOE_SIZES = tuple(f"{size}{half}" for size in range(6, 13) for half in ("", ".5"))
_COLOURS = ("black", "white", "navy blue", "dark green", "wine red", "light grey", "khaki", "rose pink", "royal purple")
_WOODS = ("walnut", "natural oak", "espresso", "white", "black", "slate grey")
_PACKS = ("pack of 1", "pack of 2", "pack of 3", "pack of 6", "pack of 12")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of product.

    Attributes:
        category: department, such as ``fashion``.
        query: ``query`` of the products of this kind (:class:`trial_envs.webshop.product.Product`), such as ``men's t-shirts``.
        path: levels of the product category, the broadest level first.
        noun: name of the kind in product titles.
        attributes: attributes that a product of this kind may have.
        options: possible values by option name.
        prices: lowest and highest price in dollars.
    """

    category: str
    query: str
    path: tuple[str, ...]
    noun: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    prices: tuple[float, float]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_CLOTHES = ("machine wash", "hand wash", "long sleeve", "short sleeve", "classic fit", "slim fit", "elastic waist")
_SHOES = _split("rubber sole, non slip, memory foam, arch support, closed toe, ankle strap, lace closure")
_SNACKS = _split("gluten free, sugar free, low carb, non gmo, plant based, dairy free, high protein, keto friendly")
_CARE = _split(
    "cruelty free, paraben free, fragrance free, sensitive skin, dry skin, natural ingredients, long lasting"
)
_ROOM = _split("easy assemble, easy clean, solid wood, living room, dining room, space saving, storage space")
_DEVICE = _split(
    "high speed, fast charging, easy use, wireless charging, noise cancelling, water resistant, carrying case"
)

_FASHION = "Clothing, Shoes & Jewelry"
_FLAVOURS = ("sea salt", "dark chocolate", "smoky barbecue", "wild berry", "honey mustard", "lemon", "spicy chili")
_SCENTS = ("lavender", "citrus", "unscented", "vanilla", "eucalyptus", "rose")
_VOLUMES = ("1 ounce", "2 ounce", "4 ounce", "8 ounce", "16 ounce")
_LENGTHS = ("3 feet", "6 feet", "10 feet", "15 feet", "25 feet")

_COLOUR_SIZE = {"color": _COLOURS, "size": _CLOTH_SIZES}
_COLOUR_SHOE = {"color": _COLOURS, "size": _SHOE_SIZES}
_FLAVOUR_PACK = {"flavor name": _FLAVOURS, "size": _PACKS}
_SCENT_SIZE = {"scent": _SCENTS, "size": _VOLUMES}

KINDS: tuple[Kind, ...] = (
    Kind(
        "fashion",
        "men's t-shirts",
        (_FASHION, "Men", "Shirts", "T-Shirts"),
        "Men Crewneck T-Shirt",
        _CLOTHES,
        _COLOUR_SIZE,
        (8, 35),
    ),
    Kind(
        "fashion",
        "women's dresses",
        (_FASHION, "Women", "Clothing", "Dresses"),
        "Women Swing Dress",
        _CLOTHES,
        _COLOUR_SIZE,
        (15, 70),
    ),
    Kind(
        "fashion",
        "men's hoodies",
        (_FASHION, "Men", "Clothing", "Hoodies"),
        "Men Pullover Hoodie",
        _CLOTHES,
        _COLOUR_SIZE,
        (20, 60),
    ),
    Kind(
        "fashion",
        "women's leggings",
        (_FASHION, "Women", "Clothing", "Leggings"),
        "Women Yoga Leggings",
        _CLOTHES,
        _COLOUR_SIZE,
        (12, 45),
    ),
    Kind(
        "fashion",
        "women's sandals",
        (_FASHION, "Women", "Shoes", "Sandals"),
        "Women Beach Sandals",
        _SHOES,
        _COLOUR_SHOE,
        (14, 60),
    ),
    Kind(
        "fashion",
        "men's loafers",
        (_FASHION, "Men", "Shoes", "Loafers"),
        "Men Leather Loafers",
        _SHOES,
        _COLOUR_SHOE,
        (25, 120),
    ),
    Kind(
        "grocery",
        "granola bars",
        ("Grocery", "Snacks", "Bars", "Granola"),
        "Granola Bars",
        _SNACKS,
        _FLAVOUR_PACK,
        (4, 30),
    ),
    Kind("grocery", "popcorn", ("Grocery", "Snacks", "Popcorn"), "Kettle Popcorn", _SNACKS, _FLAVOUR_PACK, (3, 25)),
    Kind(
        "grocery", "trail mix", ("Grocery", "Snacks", "Nuts", "Trail Mix"), "Trail Mix", _SNACKS, _FLAVOUR_PACK, (5, 40)
    ),
    Kind("grocery", "tea", ("Grocery", "Beverages", "Tea"), "Herbal Tea", _SNACKS, {"size": _PACKS}, (4, 28)),
    Kind("beauty", "face creams", ("Beauty", "Skin Care", "Face", "Creams"), "Face Cream", _CARE, _SCENT_SIZE, (7, 60)),
    Kind("beauty", "shampoo", ("Beauty", "Hair Care", "Shampoo"), "Shampoo", _CARE, _SCENT_SIZE, (6, 35)),
    Kind(
        "beauty", "body lotions", ("Beauty", "Skin Care", "Body", "Lotions"), "Body Lotion", _CARE, _SCENT_SIZE, (5, 40)
    ),
    Kind("beauty", "lip balms", ("Beauty", "Makeup", "Lips"), "Lip Balm", _CARE, {"flavor name": _FLAVOURS}, (3, 18)),
    Kind(
        "garden",
        "coffee tables",
        ("Home & Kitchen", "Furniture", "Tables", "Coffee Tables"),
        "Coffee Table",
        _ROOM,
        {"color": _WOODS, "size": ("36 inch", "42 inch", "48 inch")},
        (60, 320),
    ),
    Kind(
        "garden",
        "bookcases",
        ("Home & Kitchen", "Furniture", "Office", "Bookcases"),
        "Bookcase",
        _ROOM,
        {"color": _WOODS, "size": ("3-tier", "4-tier", "5-tier", "6-tier")},
        (45, 260),
    ),
    Kind(
        "garden",
        "area rugs",
        ("Home & Kitchen", "Decor", "Rugs"),
        "Area Rug",
        _ROOM,
        {"color": _COLOURS, "size": ("3 x 5 feet", "5 x 7 feet", "8 x 10 feet")},
        (30, 240),
    ),
    Kind(
        "garden",
        "floor lamps",
        ("Home & Kitchen", "Lighting", "Floor Lamps"),
        "Floor Lamp",
        _ROOM,
        {"color": _COLOURS},
        (35, 180),
    ),
    Kind(
        "electronics",
        "hdmi cables",
        ("Electronics", "Accessories", "Cables", "HDMI Cables"),
        "HDMI Cable",
        _DEVICE,
        {"color": _COLOURS, "size": _LENGTHS},
        (5, 45),
    ),
    Kind(
        "electronics",
        "headphones",
        ("Electronics", "Audio", "Headphones"),
        "Headphones",
        _DEVICE,
        {"color": _COLOURS},
        (18, 250),
    ),
    Kind(
        "electronics",
        "phone cases",
        ("Electronics", "Cell Phones", "Cases"),
        "Phone Case",
        _DEVICE,
        {"color": _COLOURS, "size": ("mini", "regular", "pro", "pro max")},
        (6, 40),
    ),
    Kind(
        "electronics",
        "power banks",
        ("Electronics", "Cell Phones", "Power Banks"),
        "Power Bank",
        _DEVICE,
        {"color": _COLOURS, "size": ("5000 mah", "10000 mah", "20000 mah")},
        (12, 90),
    ),
)

BRAND_STARTS = _split(
    "Al, Bel, Cor, Dan, El, Fen, Gor, Hal, Il, Jas, Kel, Lun, Mar, Nor, Or, Pel, Quin, Ros, Sol, Tal, Ul, Ver, Wes, Yor, Zan"
)
BRAND_ENDS = _split(
    "aro, berg, cove, dale, ette, field, gate, haven, iva, ley, mont, nest, oria, port, ridge, son, ton, una, vale, wick"
)
STYLES = _split(
    "Everyday, Premium, Classic, Modern, Vintage, Essential, Compact, Deluxe, Original, Nordic, Urban, Coastal"
)
PRAISE = _split(
    "carefully made, well balanced, tested by hand, loved by families, built to last, simple and honest, a fine gift"
)
USES = _split(
    "for daily use, for weekends, for travel, for small homes, for the office, for guests, for long days, for beginners"
)
VERDICTS = (
    ("Better than expected", "5.0", "Arrived early and does just what it promises."),
    ("Good value", "4.0", "No complaints for this price, I would order it again."),
    ("It is fine", "3.0", "Looks like the pictures, though a little smaller than I thought."),
    ("Not for me", "2.0", "The quality is decent, but I sent it back."),
)
