"""Tables of results as pandas frames: rows by method, columns by family, and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trial_ray.environments.registry import PACKAGED, find_adapter
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import CHAT_TEMPLATE, EvaluationResult, protocol_difference
from trial_ray.evaluation.statistics import add_adjusted, bootstrap_mean, mean_interval
from trial_ray.files import write_text

if TYPE_CHECKING:
    import pandas


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


class Block:
    """All evaluations of one split of one environment; a table has no column that spans two of them.

    Args:
        env: the environment's id.
        split: its split.
        entries: at least one.

    Attributes:
        title: heading.
        protocol: of the first entry.
        tasks: id and family of every task.
        columns: of the block.
        runs: by backbone and method, then by seed.

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
        self.runs: dict[tuple[str, str], dict[int, EvaluationResult]] = {}
        backbones: dict[str, dict[str, Any]] = {}
        for entry in entries:
            _require_one_protocol(
                self.title, *(_without_template(each) for each in (self.protocol, entry.result.protocol))
            )
            # Each backbone has a template of its own.
            own = backbones.setdefault(entry.backbone, entry.result.protocol)
            _require_one_protocol(f"{self.title}, {entry.backbone}", own, entry.result.protocol)
            self._add(entry, self.runs.setdefault((entry.backbone, entry.method), {}))
        self.columns = block_columns(env, {family for _, family in self.tasks})

    def values(self, row: tuple[str, str], column: Column, seeds: Sequence[int]) -> np.ndarray:
        """Values of the episodes of backbone and method, float ``[seeds, tasks of the column]``."""
        counted = [index for index, (_, family) in enumerate(self.tasks) if column.family in (None, family)]
        runs = [self.runs[row][seed].episodes for seed in seeds]
        return np.array(
            [
                [float(episodes[at].score if column.score else episodes[at].success) for at in counted]
                for episodes in runs
            ]
        )

    def cells(self) -> Iterator[dict[str, Any]]:
        """One of every row and column."""
        for row, runs in self.runs.items():
            for column in self.columns:
                values = self.values(row, column, sorted(runs))
                by_seed = values.mean(1)
                low, high = mean_interval(values, successes=not column.score)
                yield {
                    **dict(zip(("backbone", "method"), row, strict=True)),
                    "block": self.title,
                    "column": column.title,
                    "mean": by_seed.mean(),
                    "low": low,
                    "high": high,
                    "seed_std": by_seed.std(ddof=1) if len(by_seed) > 1 else np.nan,
                    "seeds": len(runs),
                    "by_seed": " ".join(
                        f"{seed}={value:.6g}" for seed, value in zip(sorted(runs), by_seed, strict=True)
                    ),
                    "episodes": values.size,
                }

    def differences(self, backbone: str, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
        """Paired differences in the columns that stand for the whole split, over the seeds and tasks that both have.

        ``p_holm`` is adjusted for the number of comparisons of the same backbone and column.

        Args:
            backbone: of both methods.
            pairs: a method and its reference each.
        """
        made = []
        for column in (column for column in self.columns if column.family is None):
            family = []
            for method, reference in pairs:
                rows = (backbone, reference), (backbone, method)
                first, second = (self.runs.get(row, {}) for row in rows)
                if seeds := sorted(first.keys() & second.keys()):
                    before, after = (self.values(row, column, seeds) for row in rows)
                    where = {"backbone": backbone, "method": method, "reference": reference}
                    found = bootstrap_mean(after - before).to_dict()
                    family.append({**where, "block": self.title, "column": column.title, **found})
            add_adjusted(family)
            made += family
        return made

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

    Raises:
        TableError: the evaluations follow different protocols, or are of different evaluation sets, or none is of the reference.
    """

    def __init__(self, entries: Iterable[TableEntry], reference: str | None = None, subject: str | None = None) -> None:
        entries = list(entries)
        if not entries:
            raise TableError("A table needs at least one evaluation; found none.")
        self._rows = list(dict.fromkeys((entry.backbone, entry.method) for entry in entries))
        self._reference, self._subject = reference or entries[0].method, subject
        known = dict.fromkeys(entry.method for entry in entries)
        if self._reference not in known:
            raise TableError(f"No evaluation is of the reference {self._reference!r}; there are {', '.join(known)}.")
        by_split: dict[tuple[str, str], list[TableEntry]] = {}
        for entry in entries:
            protocol = entry.result.protocol
            by_split.setdefault((str(protocol.get("env")), str(protocol.get("split"))), []).append(entry)
        splits = sorted(by_split, key=lambda found: block_order(*found))
        self._blocks = [Block(*split, by_split[split]) for split in splits]
        by_env: dict[str, dict[str, Any]] = {}
        for (env, _), block in zip(splits, self._blocks, strict=True):
            shared = {key: value for key, value in _without_template(block.protocol).items() if key not in OF_A_SPLIT}
            _require_one_protocol(f"{block.title} and another split", by_env.setdefault(env, shared), shared)

    @cached_property
    def cells(self) -> pandas.DataFrame:
        """A line a row and column: mean over seeds in [0, 1] with its 95 % interval (:func:`mean_interval`), and every seed's."""
        import pandas

        return pandas.DataFrame([cell for block in self._blocks for cell in block.cells()])

    @cached_property
    def differences(self) -> pandas.DataFrame:
        """Paired differences of whole splits: from the reference, then the subject's (:meth:`Block.differences`)."""
        import pandas

        found: list[dict[str, Any]] = []
        for backbone in dict.fromkeys(backbone for backbone, _ in self._rows):
            methods = [method for own, method in self._rows if own == backbone]
            pairs = [(method, self._reference) for method in methods if method != self._reference]
            if self._subject in methods:
                pairs += [
                    (self._subject, method) for method in methods if method not in (self._subject, self._reference)
                ]
            for block in self._blocks:
                found += block.differences(backbone, pairs)
        return pandas.json_normalize(found)

    def frame(self, title: Callable[[str], str] = str) -> pandas.DataFrame:
        """The table as the paper has it, in percent: ``mean [low, high]``, a dash where a row was not evaluated.

        Args:
            title: how a method of some name is written; by default its own name.
        """
        texts = self.cells.assign(
            text=[
                f"{100 * cell.mean:.1f} [{100 * cell.low:.1f}, {100 * cell.high:.1f}]"
                for cell in self.cells.itertuples()
            ]
        )
        columns = [(block.title, column.title) for block in self._blocks for column in block.columns]
        wide = texts.pivot(index=["backbone", "method"], columns=["block", "column"], values="text")
        wide = wide.reindex(index=self._rows, columns=columns).fillna("–")
        return wide.rename(index=title, level="method").rename_axis(columns=(None, None))

    def write(self, path: Path, title: Callable[[str], str] = str) -> list[Path]:
        """Write the cells and the differences as CSV and the table as LaTeX (booktabs); returns the files.

        Args:
            path: their name, without a suffix.
            title: as for :meth:`frame`.
        """
        latex = self.frame(title).to_latex(escape=True, caption=CAPTION, position="t", multicolumn_format="c")
        return [
            write_text(path.with_suffix(".csv"), self.cells.to_csv(index=False)),
            write_text(path.with_name(f"{path.name}_differences.csv"), self.differences.to_csv(index=False)),
            write_text(path.with_suffix(".tex"), latex),
        ]


CAPTION = (
    r"Success and score in percent, mean over seeds, with 95\% intervals (success, and scores that are all 0 or all 100: Wilson's "
    "over all episodes; other scores: bootstrap over seeds and tasks). Avg. is the success of the split, not the mean of the "
    "families."
)


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
