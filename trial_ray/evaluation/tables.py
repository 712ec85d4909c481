"""Result tables as pandas data frames: one row per method, one column per task family, and paired differences of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trial_ray.adapters.registry import find_adapter
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import CHAT_TEMPLATE, EvaluationResult, protocol_difference
from trial_ray.evaluation.statistics import add_adjusted, bootstrap_mean, mean_interval
from trial_ray.files import Json, write_text

if TYPE_CHECKING:
    import pandas

OF_A_SPLIT = ("split", "num_tasks", "panel_sha256", "instructions_sha256")
"""Entries of evaluation protocols that may differ between the splits of an environment in a table. All other entries must be
equal in all evaluations of the environment, except for the chat template, which may differ between backbones."""
WHOLE = ("Avg.", "Succ.", "Score")
"""Headings of the columns for all tasks of a split."""


class TableError(UserInputError):
    """Evaluations cannot be combined in one table."""


@dataclass(frozen=True)
class TableEntry:
    """An evaluation with its backbone (initial policy) and method, which identify a row of the table, and its training seed."""

    backbone: str
    method: str
    seed: int
    result: EvaluationResult

    @classmethod
    def from_labels(cls, result: EvaluationResult) -> TableEntry:
        """Create the entry from ``result.labels``, which ``trial-ray evaluate`` sets for checkpoints of a run.

        Raises:
            TableError: a label is missing or has the wrong type.
        """
        labels = result.labels
        kinds: Json = {"backbone": str, "method": str, "seed": int | None}
        if wrong := [name for name, kind in kinds.items() if name not in labels or not isinstance(labels[name], kind)]:
            missing = [name for name in wrong if name not in labels]
            problem = f"lacks the labels {missing}" if missing else f"is labelled with {wrong[0]} {labels[wrong[0]]!r}"
            raise TableError(
                f"The evaluation of {result.policy or 'an unnamed policy'} {problem}; evaluate a checkpoint inside a run "
                "folder, or make the TableEntry yourself."
            )
        return cls(labels["backbone"], labels["method"], labels["seed"] or 0, result)

    @property
    def row(self) -> tuple[str, str]:
        """Backbone and method, which identify the evaluation's row in a :class:`ResultTable`."""
        return self.backbone, self.method

    @property
    def place(self) -> tuple[str, str]:
        """Environment id and split of the evaluation."""
        protocol = self.result.protocol
        return str(protocol.get("env")), str(protocol.get("split"))

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """Task and family of every episode."""
        return [(episode.task_id, episode.family) for episode in self.result.episodes]

    def __str__(self) -> str:
        return f"{self.backbone} {self.method} seed {self.seed}"


class ResultTable:
    """Result table with one row per backbone and method, and one block of columns per environment and split.

    If the environment's adapter has titles of task families, a block has the success on each family that was played and on the
    whole split; otherwise it has success and score on the whole split.

    Args:
        entries: at least one evaluation; rows are in the order in which backbones and methods first occur.
        reference: method that all other methods are compared with; ``None`` takes the method of the first row.
        subject: method that is also compared with every other method, or ``None``.

    Raises:
        TableError: evaluations have different protocols or evaluation sets, the reference method is missing, an evaluation or a
            task occurs twice, an evaluation has failed episodes or no episodes, or the seeds of a row were trained for different
            numbers of iterations.
    """

    def __init__(self, entries: Iterable[TableEntry], reference: str | None = None, subject: str | None = None) -> None:
        entries = list(entries)
        if not entries:
            raise TableError("Expected at least one evaluation for a table, got none.")
        self._rows = list(dict.fromkeys(entry.row for entry in entries))
        self._reference, self._subject = reference or entries[0].method, subject
        known = dict.fromkeys(entry.method for entry in entries)
        if self._reference not in known:
            raise TableError(
                f"No evaluation has the reference method {self._reference!r}; expected one of {', '.join(known)}."
            )
        _require_one_protocol(entries)
        # Values of all episodes, by block and column, then by row, then by seed.
        self._values: dict[tuple[str, str], dict[tuple[str, str], dict[int, list[float]]]] = {}
        for env, split in sorted({entry.place for entry in entries}):
            adapter = find_adapter(env)
            block = adapter.labels.split_titles.get(split, f"{adapter.name} {split}")
            if block in {title for title, _ in self._values}:  # Another block already has this title.
                block = f"{env} {split}"
            titles = adapter.labels.family_titles
            played = [entry for entry in entries if entry.place == (env, split)]
            _require_complete(block, played)
            families = {family for _, family in played[0].tasks}
            for family in [*(name for name in titles if name in families), *sorted(families - titles.keys())]:
                if titles:
                    self._add((block, titles.get(family, family)), played, family)
            for column in WHOLE[:1] if titles else WHOLE[1:]:
                self._add((block, column), played)

    def _add(self, column: tuple[str, str], entries: Sequence[TableEntry], family: str | None = None) -> None:
        """Add a column for the episodes of a task family, or for all episodes if ``family`` is ``None``."""
        kind = "score" if column[1] == "Score" else "success"
        for entry in entries:
            episodes = [episode for episode in entry.result.episodes if family in (None, episode.family)]
            values = self._values.setdefault(column, {}).setdefault(entry.row, {})
            values[entry.seed] = [float(getattr(episode, kind)) for episode in episodes]

    @cached_property
    def cells(self) -> pandas.DataFrame:
        """Data frame with one row per cell: mean over seeds in [0, 1], 95 % interval (:func:`mean_interval`), mean of each seed."""
        import pandas

        cells = []
        for (block, column), rows in self._values.items():
            for (backbone, method), by_seed in rows.items():
                seeds = sorted(by_seed)
                values = np.array([by_seed[seed] for seed in seeds])
                means = values.mean(1)
                low, high = mean_interval(values, successes=column != "Score")
                cells.append(
                    {
                        "backbone": backbone,
                        "method": method,
                        "block": block,
                        "column": column,
                        "mean": means.mean(),
                        "low": low,
                        "high": high,
                        "seed_std": means.std(ddof=1) if len(seeds) > 1 else np.nan,
                        "seeds": len(seeds),
                        "by_seed": " ".join(f"{seed}={mean:.6g}" for seed, mean in zip(seeds, means, strict=True)),
                        "episodes": values.size,
                    }
                )
        return pandas.DataFrame(cells)

    @cached_property
    def differences(self) -> pandas.DataFrame:
        """Differences between methods on whole splits, paired by the training seeds that both methods have.

        Each method is compared with the method ``reference``, and the method ``subject``, if any, also with every other method.
        ``p_holm`` is the p-value adjusted by Holm's method over all comparisons with equal backbone, split and column.
        """
        import pandas

        differences: list[Json] = []
        for backbone in dict.fromkeys(backbone for backbone, _ in self._rows):
            methods = [method for name, method in self._rows if name == backbone and method != self._reference]
            pairs = [(method, self._reference) for method in methods]
            if self._subject in methods:
                pairs += [(self._subject, method) for method in methods if method != self._subject]
            for (block, column), rows in self._values.items():
                if column not in WHOLE:
                    continue
                family = []
                for method, reference in pairs:
                    after, before = rows.get((backbone, method), {}), rows.get((backbone, reference), {})
                    if seeds := sorted(after.keys() & before.keys()):
                        difference = np.subtract([after[seed] for seed in seeds], [before[seed] for seed in seeds])
                        where = {"backbone": backbone, "method": method, "reference": reference, "block": block}
                        family.append({**where, "column": column, **asdict(bootstrap_mean(difference))})
                add_adjusted(family)
                differences += family
        return pandas.json_normalize(differences)

    def frame(self, title: Callable[[str], str] = str) -> pandas.DataFrame:
        """Return the table as text in percent: ``mean [low, high]``, or a dash if a method was not evaluated on a split.

        Args:
            title: function that returns the displayed name of a method; by default, its name in the entries.
        """
        percent = (100 * self.cells[["mean", "low", "high"]]).to_numpy()
        texts = self.cells.assign(text=[f"{mean:.1f} [{low:.1f}, {high:.1f}]" for mean, low, high in percent])
        wide = texts.pivot(index=["backbone", "method"], columns=["block", "column"], values="text")
        wide = wide.reindex(index=self._rows, columns=list(self._values)).fillna("–")
        return wide.rename(index=title, level="method").rename_axis(columns=(None, None))

    def write(self, path: Path, title: Callable[[str], str] = str) -> list[Path]:
        """Write the cells and the differences as CSV and the table as LaTeX (booktabs), and return the paths.

        Args:
            path: path of the files, without a suffix.
            title: as in :meth:`frame`.
        """
        latex = self.frame(title).to_latex(escape=True, caption=CAPTION, position="t", multicolumn_format="c")
        return [
            write_text(path.with_name(f"{path.name}.csv"), self.cells.to_csv(index=False)),
            write_text(path.with_name(f"{path.name}_differences.csv"), self.differences.to_csv(index=False)),
            write_text(path.with_name(f"{path.name}.tex"), latex),
        ]


CAPTION = (
    r"Success and score in percent, mean over seeds, with 95\% intervals (success, and scores that are all 0 or all 100: Wilson's "
    "over all episodes; other scores: bootstrap over seeds and tasks). Avg. is the success of the split, not the mean of the "
    "families."
)


def _require_one_protocol(entries: Sequence[TableEntry]) -> None:
    """Check that all evaluations of an environment have one protocol, apart from splits and the backbones' chat templates."""
    first: dict[tuple[str, ...], Json] = {}
    for entry in entries:
        env, split = entry.place
        for key, ignored in (
            ((env, split, entry.backbone), ()),
            ((env, split), (CHAT_TEMPLATE,)),
            ((env,), (*OF_A_SPLIT, CHAT_TEMPLATE)),
        ):
            own = {name: value for name, value in entry.result.protocol.items() if name not in ignored}
            if difference := protocol_difference(first.setdefault(key, own), own):
                kind = "evaluation sets" if difference.startswith(OF_A_SPLIT) else "protocols"
                raise TableError(
                    f"{', '.join(key)}: evaluations of different {kind} cannot be in one table: {difference}. Evaluate all of them "
                    "in the same way."
                )


def _require_complete(block: str, entries: Sequence[TableEntry]) -> None:
    """Check that a split's evaluations have the same tasks, one episode per task, and equally long training in each row."""
    tasks = entries[0].tasks
    if not tasks:
        raise TableError(f"{block}: the evaluations have no episodes; evaluate again.")
    if len(dict(tasks)) < len(tasks):
        raise TableError(f"{block}: a task occurs more than once; a mean takes one episode per task.")
    names = [str(entry) for entry in entries]
    trained: dict[tuple[str, str], int] = {}
    for entry in entries:
        if (iteration := entry.result.labels.get("iteration")) is not None:
            first = trained.setdefault(entry.row, iteration)
            if iteration != first:
                raise TableError(
                    f"{block}: {entry} was trained for {iteration} iterations, and another seed of this row for {first}; "
                    "evaluate checkpoints of one iteration."
                )
        if names.count(str(entry)) > 1:
            raise TableError(f"{block}: there are two evaluations of {entry}; keep one.")
        if entry.result.num_failed:
            raise TableError(f"{block}: {entry.result.num_failed} episodes of {entry} failed; evaluate it again.")
        if entry.tasks != tasks:
            raise TableError(
                f"{block}: the tasks of {entry} do not match the digest of its evaluation set; evaluate it again."
            )
