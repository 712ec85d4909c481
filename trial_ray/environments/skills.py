"""Advice per task family, for the methods whose privileged view is hand-written skill text.

It is knowledge that no rollout provided: in that respect results of a method that uses it are not comparable with
those of one that only looks back at outcomes. ``.training(skills=...)`` of a config takes that of another environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_ray.errors import ConfigError


def check_skills(skills: Any) -> None:
    """Refuse what is no advice by family, or leaves families without any.

    Raises:
        ConfigError: not a mapping of texts, or without general advice; says what is missing.
    """
    if not isinstance(skills, Mapping):
        raise ConfigError(f"skills is {skills!r:.200}, expected a dict from family to advice.")
    for family, text in skills.items():
        if not isinstance(family, str) or not isinstance(text, str) or not text.strip():
            raise ConfigError(f"skills[{family!r}] is {text!r:.200}, expected a family (str) and its advice (a text).")
    if "" not in skills:
        raise ConfigError('skills needs general advice under the key "", for families that have none of their own.')


_SEARCH = (
    "Objects may be on any surface or inside anything that opens. Visit places one after the other, open what is closed, "
    "read what is there, and do not return to a place already seen. "
)

_ALFWORLD = {
    "": _SEARCH + "Take an object only if the task names it. When you hold it, do what the task asks, then bring it "
    "to its destination.",
    "pick_and_place_simple": _SEARCH + "Take the named object as soon as you see it, go to the destination, open it "
    "if it is closed, and move the object there.",
    "look_at_obj_in_light": _SEARCH + "Take the object to be examined first. Then find the place with the desk lamp "
    "and use the lamp while you hold the object.",
    "pick_clean_then_place_in_recep": _SEARCH + "Carry the object to a sink basin and clean it there before you bring "
    "it to its destination; unwashed it does not count.",
    "pick_heat_then_place_in_recep": _SEARCH + "Carry the object to the microwave and heat it there before you bring "
    "it to its destination.",
    "pick_cool_then_place_in_recep": _SEARCH + "Carry the object to the fridge and cool it there before you bring it "
    "to its destination.",
    "pick_two_obj_and_place": _SEARCH + "You can hold one object at a time: bring the first to the destination, then "
    "look for a second of the same kind, and remember where you saw more than one.",
}
_SHOP = (
    "Search with the product's kind and its two or three most telling properties, not with the whole instruction. "
    "Prefer results whose title names these properties and whose price is below the limit. On the product's page "
    "choose every option that the instruction names before you buy; a missing option costs reward. If the price is "
    "over the limit or an option is not on offer, go back and take another result instead of searching again. "
)

_WEBSHOP = {
    "": _SHOP.strip(),
    "fashion": _SHOP + "For clothes and shoes search with the garment and whom it is for, then choose the fit or type "
    "where one is named, the colour as it is written, and the size; variants differ in price, so look at the price "
    "again when all are chosen.",
    "garden": _SHOP
    + "For furniture and home textiles the size decides: take the one whose numbers are exactly those of "
    "the instruction, not the nearest, and choose colour and shape as well. Material and care are told under the "
    "features.",
    "beauty": _SHOP
    + "For care and beauty products look for the property that was asked for, such as what they are free "
    "of or what they are for, in the title or under the features; colours and sizes often have names or numbers of "
    "their own, so choose the label that repeats the instruction's.",
    "electronics": _SHOP + "For electronics a wrong model is worth little: check that the technical properties of the "
    "instruction stand in the title or under the features before you choose colour, size or style.",
    "grocery": _SHOP
    + "For food and drink look for the diet or ingredient that was asked for, choose the flavour by its "
    "full name, and take the pack whose weight and count are both those of the instruction.",
}

SKILLS: dict[str, dict[str, str]] = {"trial/ALFWorld-v0": _ALFWORLD, "trial/WebShop-v0": _WEBSHOP}
"""Environment id → family → advice; under ``""`` the advice for families that have none of their own."""
