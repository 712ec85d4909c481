"""Blocks and columns of a result table: which evaluations stand side by side, and what a column counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trial_ray.rollout.trajectory import EpisodeResult

ALFWORLD, WEBSHOP = "trial/ALFWorld-v0", "trial/WebShop-v0"

FAMILY_TITLES = {
    "pick_and_place_simple": "P&P",
    "pick_two_obj_and_place": "Two",
    "look_at_obj_in_light": "Look",
    "pick_heat_then_place_in_recep": "Heat",
    "pick_cool_then_place_in_recep": "Cool",
    "pick_clean_then_place_in_recep": "Clean",
}
"""ALFWorld's families in the order of the paper's Table 2."""
SPLIT_TITLES = {
    (ALFWORLD, "valid_seen"): "ALFWorld Seen",
    (ALFWORLD, "valid_unseen"): "ALFWorld Unseen",
    (WEBSHOP, "test"): "WebShop",
}
_ORDER = list(SPLIT_TITLES)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a block.

    Attributes:
        title: heading.
        counts: whether an episode belongs to it.
        score: whether it averages scores rather than successes.
    """

    title: str
    counts: Callable[[EpisodeResult], bool]
    score: bool = False

    def value(self, episode: EpisodeResult) -> float:
        """What an episode contributes to the mean."""
        return episode.score if self.score else float(episode.success)


def block_title(env: str, split: str) -> str:
    """Heading of the block of one environment's split."""
    return SPLIT_TITLES.get((env, split), f"{env.rpartition('/')[2].partition('-')[0]} {split}")


def block_order(env: str, split: str) -> tuple[int, str, str]:
    """Sort key: the paper's order, then alphabetically."""
    place = _ORDER.index((env, split)) if (env, split) in _ORDER else len(_ORDER)
    return place, env, split


def block_columns(env: str, families: set[str]) -> list[Column]:
    """ALFWorld: success of each family that was played, then of the split; elsewhere success and score of the split."""
    if env != ALFWORLD:
        return [Column("Succ.", _every), Column("Score", _every, score=True)]
    known = [name for name in FAMILY_TITLES if name in families]
    ordered = known + sorted(families - set(known))
    return [Column(FAMILY_TITLES.get(name, name), _of_family(name)) for name in ordered] + [Column("Avg.", _every)]


def _every(episode: EpisodeResult) -> bool:
    return True


def _of_family(name: str) -> Callable[[EpisodeResult], bool]:
    return lambda episode: episode.family == name
