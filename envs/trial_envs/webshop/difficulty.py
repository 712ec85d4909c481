"""Difficulty levels of the generated shops."""

from __future__ import annotations

from dataclasses import dataclass

from trial_envs.webshop.pages import RESULTS_PER_PAGE


@dataclass(frozen=True, slots=True)
class Difficulty:
    """One difficulty level."""

    name: str
    products: int
    """Number of products by default."""
    most_products: int
    """Maximum number of products."""
    results_per_page: int
    """Products on a page of results."""
    concise: bool
    """Whether texts are as short as possible: a product has one attribute, one option of two or three values and a price in whole
    dollars, its id is ``G`` and two numbers, of its kind and among its kind, and no goal limits the price."""


LEVELS = {
    level.name: level
    for level in (
        Difficulty("tiny", 88, 88, 4, concise=True),
        Difficulty("official", 200, 36**5, RESULTS_PER_PAGE, concise=False),
    )
}
