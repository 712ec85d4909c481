"""Blocks and columns of a result table: which evaluations stand side by side, and what a column counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trial_ray.environments.entry import PACKAGED, find_adapter
from trial_ray.rollout.trajectory import EpisodeResult


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
    adapter = find_adapter(env)
    return adapter.split_titles.get(split, f"{adapter.name} {split}")


def block_order(env: str, split: str) -> tuple[int, str, str]:
    """Sort key: the splits that this package's adapters name come first, in their order, then alphabetically."""
    named = [(adapter.env_id, known) for adapter in PACKAGED.values() for known in adapter.split_titles]
    return (named.index((env, split)) if (env, split) in named else len(named)), env, split


def block_columns(env: str, families: set[str]) -> list[Column]:
    """Where the adapter names families, success of each that was played, then of the split; else success and score."""
    titles = find_adapter(env).family_titles
    if not titles:
        return [Column("Succ.", _every), Column("Score", _every, score=True)]
    known = [name for name in titles if name in families]
    ordered = known + sorted(families - set(known))
    return [Column(titles.get(name, name), _of_family(name)) for name in ordered] + [Column("Avg.", _every)]


def _every(episode: EpisodeResult) -> bool:
    return True


def _of_family(name: str) -> Callable[[EpisodeResult], bool]:
    return lambda episode: episode.family == name
