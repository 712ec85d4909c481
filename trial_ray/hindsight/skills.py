"""Advice per task family, for the methods whose privileged view is hand-written skill text.

It is knowledge that no rollout provided: in that respect results of a method that uses it are not comparable with
those of one that only looks back at outcomes. :func:`register_skills` adds another environment's.
"""

from __future__ import annotations

from collections.abc import Mapping

from trial_ray.errors import ConfigError

SKILLS: dict[str, dict[str, str]] = {}
"""Environment id → family → advice; under ``""`` the advice for families that have none of their own."""


def register_skills(environment: str, advice: Mapping[str, str]) -> None:
    """Offer the ``skill`` view for an environment; replaces what was there.

    Args:
        environment: the environment's id.
        advice: text by family (``info["family"]``), and under ``""`` for all other families.

    Raises:
        ConfigError: the general advice is missing.
    """
    if not advice.get(""):
        raise ConfigError(f'the skills of {environment} need general advice under the key ""; add it')
    SKILLS[environment] = dict(advice)


_SEARCH = (
    "Objects may be on any surface or inside anything that opens. Visit places one after the other, open what is closed, "
    "read what is there, and do not return to a place already seen. "
)

register_skills(
    "trial/ALFWorld-v0",
    {
        "": _SEARCH
        + "Take an object only if the task names it. When you hold it, do what the task asks, then bring it "
        "to its destination.",
        "pick_and_place_simple": _SEARCH
        + "Take the named object as soon as you see it, go to the destination, open it "
        "if it is closed, and move the object there.",
        "look_at_obj_in_light": _SEARCH
        + "Take the object to be examined first. Then find the place with the desk lamp "
        "and use the lamp while you hold the object.",
        "pick_clean_then_place_in_recep": _SEARCH
        + "Carry the object to a sink basin and clean it there before you bring "
        "it to its destination; unwashed it does not count.",
        "pick_heat_then_place_in_recep": _SEARCH
        + "Carry the object to the microwave and heat it there before you bring "
        "it to its destination.",
        "pick_cool_then_place_in_recep": _SEARCH
        + "Carry the object to the fridge and cool it there before you bring it "
        "to its destination.",
        "pick_two_obj_and_place": _SEARCH
        + "You can hold one object at a time: bring the first to the destination, then "
        "look for a second of the same kind, and remember where you saw more than one.",
    },
)
_SHOP = (
    "Search with the product's kind and its two or three most telling properties, not with the whole instruction. "
    "Prefer results whose title names these properties and whose price is below the limit. On the product's page "
    "choose every option that the instruction names before you buy; a missing option costs reward. If the price is "
    "over the limit or an option is not on offer, go back and take another result instead of searching again. "
)

register_skills(
    "trial/WebShop-v0",
    {
        "": _SHOP.strip(),
        "fashion": _SHOP
        + "For clothes and shoes search with the garment and whom it is for, then choose the fit or type "
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
        "electronics": _SHOP
        + "For electronics a wrong model is worth little: check that the technical properties of the "
        "instruction stand in the title or under the features before you choose colour, size or style.",
        "grocery": _SHOP
        + "For food and drink look for the diet or ingredient that was asked for, choose the flavour by its "
        "full name, and take the pack whose weight and count are both those of the instruction.",
    },
)
