"""Tables of results: rows by method, columns by family."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trial_ray.environments.registry import PACKAGED, find_adapter
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import CHAT_TEMPLATE, EvaluationResult, protocol_difference
from trial_ray.evaluation.statistics import BootstrapInterval, add_adjusted, bootstrap_mean, mean_interval


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
        TableError: protocols or tasks differ, an evaluation or a task of it occurs twice, there are no episodes, some of them
            failed, or the seeds of a row were trained for different numbers of iterations.
    """

    def __init__(self, env: str, split: str, entries: Sequence[TableEntry]) -> None:
        self.title = block_title(env, split)
        self.protocol = entries[0].result.protocol
        self.tasks = _tasks(entries[0].result)
        if not self.tasks:
            raise TableError(f"{self.title}: the evaluations have no episodes; evaluate again.")
        if len(dict(self.tasks)) < len(self.tasks):
            raise TableError(f"{self.title}: a task occurs more than once; a mean takes one episode a task.")
        self._runs: dict[tuple[str, str], dict[int, EvaluationResult]] = {}
        backbones: dict[str, dict[str, Any]] = {}
        for entry in entries:
            _require_one_protocol(
                self.title, *(_without_template(each) for each in (self.protocol, entry.result.protocol))
            )
            # Each backbone has a template of its own.
            own = backbones.setdefault(entry.backbone, entry.result.protocol)
            _require_one_protocol(f"{self.title}, {entry.backbone}", own, entry.result.protocol)
            self._add(entry, self._runs.setdefault((entry.backbone, entry.method), {}))
        self.columns = block_columns(env, {family for _, family in self.tasks})

    def cell(self, backbone: str, method: str, column: Column) -> Cell | None:
        """The row's value in ``column``; ``None`` where it was not evaluated."""
        seeds = sorted(self._runs.get((backbone, method), ()))
        if not seeds:
            return None
        values = self.values(backbone, method, column, seeds)
        by_seed = values.mean(1)
        interval = mean_interval(values, successes=not column.score)
        return Cell(float(by_seed.mean()), interval, dict(zip(seeds, map(float, by_seed), strict=True)), values.size)

    def values(self, backbone: str, method: str, column: Column, seeds: Sequence[int]) -> np.ndarray:
        """Values of the episodes, float ``[seeds, tasks of the column]``."""
        counted = [index for index, (_, family) in enumerate(self.tasks) if column.family in (None, family)]
        runs = [self._runs[backbone, method][seed].episodes for seed in seeds]
        return np.array(
            [
                [float(episodes[at].score if column.score else episodes[at].success) for at in counted]
                for episodes in runs
            ]
        )

    def compare(self, backbone: str, first: str, second: str, column: Column) -> BootstrapInterval | None:
        """``second - first`` over the seeds and tasks that both have; ``None`` without a common seed."""
        runs = [self._runs.get((backbone, method), {}) for method in (first, second)]
        seeds = sorted(runs[0].keys() & runs[1].keys())
        if not seeds:
            return None
        before, after = (self.values(backbone, method, column, seeds) for method in (first, second))
        return bootstrap_mean(after - before)

    def _add(self, entry: TableEntry, row: dict[int, EvaluationResult]) -> None:
        where = f"{entry.backbone} {entry.method} seed {entry.seed}"
        trained = [entry.result.labels.get("iteration"), *(result.labels.get("iteration") for result in row.values())]
        if len(known := list(dict.fromkeys(number for number in trained if number is not None))) > 1:
            raise TableError(
                f"{self.title}: {where} was trained for {known[0]} iterations, and another seed of this row for {known[1]}; "
                "evaluate checkpoints of one iteration."
            )
        if entry.seed in row:
            raise TableError(f"{self.title}: there are two evaluations of {where}; keep one.")
        if entry.result.num_failed:
            raise TableError(f"{self.title}: {entry.result.num_failed} episodes of {where} failed; evaluate it again.")
        if _tasks(entry.result) != self.tasks:
            raise TableError(
                f"{self.title}: {where} holds other tasks than its evaluation set's digest says; evaluate it again."
            )
        row[entry.seed] = entry.result


class ResultTable:
    """Rows of methods per backbone, one block of columns for each split of each environment.

    Args:
        entries: at least one; rows keep the order in which backbones and methods first occur.
        reference: method that the others are compared with; default the first row's.
        subject: method that is compared with every other as well; default none.

    Attributes:
        methods: of each backbone, in the order of the rows.
        blocks: of columns.

    Raises:
        TableError: the evaluations follow different protocols, or are of different evaluation sets, or none is of the reference.
    """

    def __init__(self, entries: Iterable[TableEntry], reference: str | None = None, subject: str | None = None) -> None:
        entries = list(entries)
        if not entries:
            raise TableError("A table needs at least one evaluation; found none.")
        self.methods: dict[str, list[str]] = {}
        for backbone, method in dict.fromkeys((entry.backbone, entry.method) for entry in entries):
            self.methods.setdefault(backbone, []).append(method)
        self.reference, self.subject = reference or entries[0].method, subject
        known = dict.fromkeys(entry.method for entry in entries)
        if self.reference not in known:
            raise TableError(f"No evaluation is of the reference {self.reference!r}; there are {', '.join(known)}.")
        by_split: dict[tuple[str, str], list[TableEntry]] = {}
        for entry in entries:
            protocol = entry.result.protocol
            by_split.setdefault((str(protocol.get("env")), str(protocol.get("split"))), []).append(entry)
        splits = sorted(by_split, key=lambda found: block_order(*found))
        self.blocks = [Block(*split, by_split[split]) for split in splits]
        by_env: dict[str, dict[str, Any]] = {}
        for (env, _), block in zip(splits, self.blocks, strict=True):
            shared = {key: value for key, value in _without_template(block.protocol).items() if key not in OF_A_SPLIT}
            _require_one_protocol(f"{block.title} and another split", by_env.setdefault(env, shared), shared)

    @property
    def columns(self) -> list[tuple[Block, Column]]:
        """All columns, block by block."""
        return [(block, column) for block in self.blocks for column in block.columns]

    def cells(self, backbone: str, method: str) -> list[Cell | None]:
        """A row's cells, block by block."""
        return [block.cell(backbone, method, column) for block, column in self.columns]

    def to_dict(self) -> dict[str, Any]:
        """Every cell with its interval, the comparisons, and the protocols, as plain values."""
        rows = [
            {
                "backbone": backbone,
                "method": method,
                "cells": [cell.to_dict() if cell else None for cell in self.cells(backbone, method)],
            }
            for backbone, methods in self.methods.items()
            for method in methods
        ]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "protocols": {block.title: block.protocol for block in self.blocks},
            "columns": [{"block": block.title, "column": column.title} for block, column in self.columns],
            "rows": rows,
            "comparisons": self.comparisons(),
        }

    def comparisons(self) -> list[dict[str, Any]]:
        """Paired differences for the columns that stand for a whole split: from the reference, then the subject's.

        ``p_holm`` is adjusted for the number of comparisons of the same backbone and column.
        """
        made = []
        for backbone, methods in self.methods.items():
            pairs = [(method, self.reference) for method in methods if method != self.reference]
            if self.subject in methods:
                others = [method for method in methods if method not in (self.subject, self.reference)]
                pairs += [(self.subject, other) for other in others]
            for block, column in self.columns:
                family = []
                for method, reference in pairs if column.family is None else ():
                    if (found := block.compare(backbone, reference, method, column)) is not None:
                        where = {"backbone": backbone, "method": method, "reference": reference}
                        family.append({**where, "block": block.title, "column": column.title, **found.to_dict()})
                add_adjusted(family)
                made += family
        return made


def _tasks(result: EvaluationResult) -> list[tuple[str, str]]:
    """Task and family of every episode."""
    return [(episode.task_id, episode.family) for episode in result.episodes]


def _without_template(protocol: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in protocol.items() if key != CHAT_TEMPLATE}


def _require_one_protocol(title: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    if difference := protocol_difference(first, second):
        kind = "evaluation sets" if difference.startswith(OF_A_SPLIT) else "protocols"
        raise TableError(
            f"{title}: evaluations of different {kind} cannot stand in one table: {difference}. Evaluate all of them in "
            "the same way."
        )
