"""Difficulty levels of the generated shops."""

from __future__ import annotations

from dataclasses import dataclass

from trial_envs.webshop.pages import RESULTS_PER_PAGE


@dataclass(frozen=True, slots=True)
class Difficulty:
    """One difficulty level."""

    name: str
    products: int
    """Default number of products."""
    max_products: int
    """Maximum number of products."""
    results_per_page: int
    """Number of products on a results page."""
    concise: bool
    """True if texts are as short as possible.

    A product then has one attribute, one option with two or three values, and a price in whole dollars. Its id consists of
    ``G``, the number of its kind and its number within the kind. Goals have no price limit."""


LEVELS = {
    level.name: level
    for level in (
        Difficulty("tiny", 88, 88, 4, concise=True),
        Difficulty("official", 200, 36**5, RESULTS_PER_PAGE, concise=False),
    )
}
