"""A small shop of our own as its source files, named as the original's."""

import json

PRODUCTS = [
    {
        "asin": f"B00000000{n}",
        "name": f"Red Lamp number {n}",
        "full_description": "",
        "small_description": ["Bright", "Tall"],
        "customization_options": {"Color": [{"value": " Red/Blue "}, {"value": "Green"}], "size": None},
        "category": "garden",
        "query": " Lamps ",
        "product_category": "Home › Lamps",
        "pricing": "$10.50 - $20.00" if n else "",
        "images": [],
    }
    for n in range(3)
]
ATTRIBUTES = {
    p["asin"]: {"attributes": ["bright"], "instruction": "Find me bright lamps", "instruction_attributes": ["bright"]}
    for p in PRODUCTS
}
NOUNS = {product["asin"]: product["name"].lower().split() for product in PRODUCTS}
"""With these as ``title_nouns`` a source needs no tagger."""


def write_source(folder, products=PRODUCTS, attributes=ATTRIBUTES, **further):
    """A folder with the original's file names; ``further`` are files by their names without ``.json``."""
    folder.mkdir()
    for name, content in {"items_shuffle": products, "items_ins_v2": attributes, **further}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    return folder


def tag(titles):
    """A stand-in for the tagger: every word is a noun."""
    return (title.lower().split() for title in titles)
