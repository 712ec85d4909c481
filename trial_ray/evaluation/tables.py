"""Tables of results: rows by method, columns by family."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from trial_ray.environments.registry import PACKAGED, find_adapter
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.evaluation.statistics import (
    BootstrapInterval,
    add_adjusted,
    mean_interval,
    paired_bootstrap,
)
from trial_ray.rollout.trajectory import EpisodeResult


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a block.

    Attributes:
        title: heading.
        family: whose episodes it averages; ``None``: all.
        score: whether it averages scores rather than successes.
    """

    title: str
    family: str | None = None
    score: bool = False

    def counts(self, episode: EpisodeResult) -> bool:
        """Whether an episode belongs to it."""
        return self.family in (None, episode.family)

    def value(self, episode: EpisodeResult) -> float:
        """What an episode contributes to the mean."""
        return episode.score if self.score else float(episode.success)


def block_title(env: str, split: str) -> str:
    """Heading of the block of one environment's split."""
    adapter = find_adapter(env)
    return adapter.labels.split_titles.get(split, f"{adapter.name} {split}")


def block_order(env: str, split: str) -> tuple[int, str, str]:
    """Sort key: the splits that this package's adapters name come first, in their order, then alphabetically."""
    named = [(adapter.env_id, known) for adapter in PACKAGED.values() for known in adapter.labels.split_titles]
    return (named.index((env, split)) if (env, split) in named else len(named)), env, split


def block_columns(env: str, families: set[str]) -> list[Column]:
    """Where the adapter names families, success of each that was played, then of the split; else success and score."""
    titles = find_adapter(env).labels.family_titles
    if not titles:
        return [Column("Succ."), Column("Score", score=True)]
    known = [name for name in titles if name in families]
    ordered = known + sorted(families - set(known))
    return [Column(titles.get(name, name), name) for name in ordered] + [Column("Avg.")]


SCHEMA = "trial_ray/result_table"
SCHEMA_VERSION = 1
# What differs between an environment's splits; everything else must be equal in all of a table's cells of it.
OF_A_SPLIT = ("split", "num_tasks", "panel_sha256", "instructions_sha256")


class TableError(UserInputError):
    """Evaluations do not belong into one table."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One evaluation and where it stands: the row's backbone and method, and the training seed that a cell averages over."""

    backbone: str
    method: str
    seed: int
    result: EvaluationResult

    @classmethod
    def from_labels(cls, result: EvaluationResult) -> TableEntry:
        """Read the row out of the evaluation's labels, which ``trial-ray evaluate`` writes for checkpoints of a run.

        Raises:
            TableError: a label is missing or of another type.
        """
        missing = sorted({"backbone", "method", "seed"} - result.labels.keys())
        if missing:
            raise TableError(
                f"The evaluation of {result.policy or 'an unnamed policy'} lacks the labels {missing}; evaluate a "
                "checkpoint inside a run folder, or make the TableEntry yourself."
            )
        backbone, method, seed = (result.labels[name] for name in ("backbone", "method", "seed"))
        if not (isinstance(backbone, str) and isinstance(method, str) and (seed is None or type(seed) is int)):
            raise TableError(
                f"The evaluation of {result.policy or 'an unnamed policy'} is labelled with backbone {backbone!r}, method "
                f"{method!r} and seed {seed!r}; expected two texts and a whole number. Make the TableEntry yourself."
            )
        return cls(backbone, method, seed or 0, result)

    @property
    def iteration(self) -> int | None:
        """Iterations that the policy was trained for, where the evaluation says so."""
        return self.result.labels.get("iteration")


@dataclass(frozen=True, slots=True)
class Cell:
    """One mean in [0, 1] over seeds and episodes.

    Attributes:
        mean: mean over seeds of each seed's mean.
        interval: 95 % (:func:`mean_interval`).
        by_seed: each seed's mean.
        episodes: in all.
    """

    mean: float
    interval: tuple[float, float]
    by_seed: dict[int, float]
    episodes: int

    @property
    def seed_std(self) -> float | None:
        """Standard deviation over seeds; ``None`` with a single one."""
        return float(statistics.stdev(self.by_seed.values())) if len(self.by_seed) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mean": self.mean,
            "interval_95": list(self.interval),
            "seed_std": self.seed_std,
            "seeds": len(self.by_seed),
            "by_seed": {str(seed): mean for seed, mean in self.by_seed.items()},
            "episodes": self.episodes,
        }


class Block:
    """All evaluations of one split of one environment; a table has no column that spans two of them.

    Args:
        env: the environment's id.
        split: its split.
        entries: at least one.

    Raises:
        TableError: protocols or panels differ, an evaluation or a task of it occurs twice, there are no episodes, some of them
            failed, or the seeds of a row were trained for different numbers of iterations.
    """

    def __init__(self, env: str, split: str, entries: Sequence[TableEntry]) -> None:
        self.env, self.split, self.title = env, split, block_title(env, split)
        self.protocol = entries[0].result.protocol
        self.tasks = _tasks(entries[0].result)
        if not self.tasks:
            raise TableError(f"{self.title}: the evaluations have no episodes; evaluate again.")
        if len(dict(self.tasks)) < len(self.tasks):
            raise TableError(f"{self.title}: a task occurs more than once; a mean takes one episode a task.")
        self._runs: dict[tuple[str, str], dict[int, EvaluationResult]] = {}
        self._trained: dict[tuple[str, str], int] = {}
        for entry in entries:
            _require_one_protocol(self.title, self.protocol, entry.result.protocol)
            self._add(entry)
        episodes = entries[0].result.episodes
        self.columns = block_columns(env, {episode.family for episode in episodes})

    def cell(self, backbone: str, method: str, column: Column) -> Cell | None:
        """The row's value in ``column``; ``None`` where it was not evaluated."""
        runs = self._runs.get((backbone, method))
        if not runs:
            return None
        values = self.values(backbone, method, column, sorted(runs))
        by_seed = values.mean(1)
        interval = mean_interval(values, successes=not column.score)
        means = dict(zip(sorted(runs), map(float, by_seed), strict=True))
        return Cell(float(by_seed.mean()), interval, means, values.size)

    def values(self, backbone: str, method: str, column: Column, seeds: Sequence[int]) -> np.ndarray:
        """What each episode counts, float ``[seeds, tasks of the column]``."""
        runs = self._runs[backbone, method]
        rows = [{episode.task_id: episode for episode in runs[seed].episodes} for seed in seeds]
        tasks = [task for task, _ in self.tasks if column.counts(rows[0][task])]
        return np.array([[column.value(row[task]) for task in tasks] for row in rows])

    def compare(self, backbone: str, first: str, second: str, column: Column) -> BootstrapInterval | None:
        """``second - first`` over the seeds and tasks that both have; ``None`` without a common seed."""
        runs = [self._runs.get((backbone, method), {}) for method in (first, second)]
        seeds = sorted(runs[0].keys() & runs[1].keys())
        if not seeds:
            return None
        before, after = (self.values(backbone, method, column, seeds) for method in (first, second))
        return paired_bootstrap(before, after)

    def _add(self, entry: TableEntry) -> None:
        key = entry.backbone, entry.method
        row = self._runs.setdefault(key, {})
        where = f"{entry.backbone} {entry.method} seed {entry.seed}"
        if entry.iteration is not None and self._trained.setdefault(key, entry.iteration) != entry.iteration:
            raise TableError(
                f"{self.title}: {where} was trained for {entry.iteration} iterations, and another seed of this row for "
                f"{self._trained[key]}; evaluate checkpoints of one iteration."
            )
        if entry.seed in row:
            raise TableError(f"{self.title}: there are two evaluations of {where}; keep one.")
        if entry.result.num_failed:
            raise TableError(f"{self.title}: {entry.result.num_failed} episodes of {where} failed; evaluate it again.")
        if _tasks(entry.result) != self.tasks:
            raise TableError(
                f"{self.title}: {where} holds other tasks than its panel's digest says; evaluate it again."
            )
        row[entry.seed] = entry.result


class ResultTable:
    """Rows of methods per backbone, one block of columns for each split of each environment.

    Args:
        entries: at least one; rows keep the order in which backbones and methods first occur.
        reference: method that the others are compared with; default the first row's.
        subject: method that is compared with every other as well; default none.

    Raises:
        TableError: the evaluations follow different protocols, or are of different panels, or none is of the reference.
    """

    def __init__(self, entries: Iterable[TableEntry], reference: str | None = None, subject: str | None = None) -> None:
        entries = list(entries)
        if not entries:
            raise TableError("A table needs at least one evaluation; found none.")
        self.rows = list(dict.fromkeys((entry.backbone, entry.method) for entry in entries))
        self.reference = reference or self.rows[0][1]
        self.subject = subject
        methods = dict.fromkeys(method for _, method in self.rows)
        if self.reference not in methods:
            raise TableError(f"No evaluation is of the reference {self.reference!r}; there are {', '.join(methods)}.")
        splits = sorted({_split_of(entry) for entry in entries}, key=lambda found: block_order(*found))
        self.blocks = [
            Block(env, split, [entry for entry in entries if _split_of(entry) == (env, split)]) for env, split in splits
        ]
        self._require_one_protocol_by_environment()

    @property
    def backbones(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(backbone for backbone, _ in self.rows))

    def methods(self, backbone: str) -> list[str]:
        """Methods of a backbone, in the order of the rows."""
        return [method for other, method in self.rows if other == backbone]

    def cells(self, backbone: str, method: str) -> list[Cell | None]:
        """A row's cells, block by block."""
        return [block.cell(backbone, method, column) for block in self.blocks for column in block.columns]

    def to_dict(self) -> dict[str, Any]:
        """Every cell with its interval, the comparisons, and the protocols, as plain values."""
        rows = [
            {
                "backbone": backbone,
                "method": method,
                "cells": [cell.to_dict() if cell else None for cell in self.cells(backbone, method)],
            }
            for backbone, method in self.rows
        ]
        columns = [{"block": block.title, "column": column.title} for block in self.blocks for column in block.columns]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "protocols": {block.title: block.protocol for block in self.blocks},
            "columns": columns,
            "rows": rows,
            "comparisons": self.comparisons(),
        }

    def comparisons(self) -> list[dict[str, Any]]:
        """Paired differences for the columns that stand for a whole split: from the reference, then the subject's.

        ``p_holm`` is adjusted for the number of comparisons of the same backbone and column.
        """
        found = list(self._compared())
        families: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for each in found:
            families.setdefault((each["backbone"], each["block"], each["column"]), []).append(each)
        for family in families.values():
            add_adjusted(family)
        return found

    def _compared(self) -> Iterable[dict[str, Any]]:
        whole = [(block, column) for block in self.blocks for column in block.columns if column.family is None]
        for backbone in self.backbones:
            for (method, reference), (block, column) in product(self._pairs(self.methods(backbone)), whole):
                found = block.compare(backbone, reference, method, column)
                if found is not None:
                    where = {"backbone": backbone, "method": method, "reference": reference}
                    yield {**where, "block": block.title, "column": column.title, **found.to_dict()}

    def _pairs(self, methods: Sequence[str]) -> list[tuple[str, str]]:
        pairs = [(method, self.reference) for method in methods if method != self.reference]
        subject = self.subject
        if subject is not None and subject in methods:
            pairs += [(subject, other) for other in methods if other not in (subject, self.reference)]
        return pairs

    def _require_one_protocol_by_environment(self) -> None:
        by_env: dict[str, dict[str, Any]] = {}
        for block in self.blocks:
            shared = {key: value for key, value in block.protocol.items() if key not in OF_A_SPLIT}
            _require_one_protocol(f"{block.title} and another split", by_env.setdefault(block.env, shared), shared)


def _tasks(result: EvaluationResult) -> list[tuple[str, str]]:
    """Task and family of every episode."""
    return [(episode.task_id, episode.family) for episode in result.episodes]


def _split_of(entry: TableEntry) -> tuple[str, str]:
    protocol = entry.result.protocol
    return str(protocol.get("env")), str(protocol.get("split"))


def _require_one_protocol(title: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    if difference := protocol_difference(first, second):
        kind = "panels" if difference.startswith(OF_A_SPLIT) else "protocols"
        raise TableError(
            f"{title}: evaluations of different {kind} cannot stand in one table: {difference}. Evaluate all of them in "
            "the same way."
        )
