"""Records of runs, runs grouped by their method, and the turn scores and weights of their trajectories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.environments.adapter import ACTION_CLASSES, EnvironmentAdapter
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts, read_recorded

READABLE_TURNS = range(10, 26)
"""Lengths of trajectories that a figure shows well."""


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One decision and what the allocation makes of it.

    Attributes:
        action: as sent to the environment.
        outcome: what the environment answered.
        action_class: one of ``environments.adapter.ACTION_CLASSES``; empty where the environment's actions have none.
        score: s_k (Eq. 5), the mean absolute gap of its tokens, in nats.
        weight: w_k (Eq. 6), whose token-weighted mean over the trajectory is one.
        tokens: n_k.
    """

    action: str
    outcome: str
    action_class: str
    score: float
    weight: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One trajectory, turn by turn."""

    task_id: str
    family: str
    success: bool
    turns: list[TracedTurn]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def class_means(traces: Sequence[Trace]) -> dict[str, dict[str, float | int | None]]:
    """Mean weight of every class of decision over trajectories, with the standard error over their class means.

    A trajectory without a decision of some class does not count for it. With a single one the error is unknown (``None``).
    """
    summary: dict[str, dict[str, float | int | None]] = {}
    for name in ACTION_CLASSES:
        means = [
            float(np.mean(weights))
            for trace in traces
            if (weights := [turn.weight for turn in trace.turns if turn.action_class == name])
        ]
        if means:
            sem = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
            summary[name] = {"mean": float(np.mean(means)), "sem": sem, "trajectories": len(means)}
    return summary


def readable_trace(traces: Sequence[Trace]) -> Trace:
    """The one to show turn by turn: of readable length, with the most classes of decisions; the first of equals."""

    def rank(trace: Trace) -> tuple[bool, int, int]:
        length = len(trace.turns)
        return (
            length in READABLE_TURNS,
            len({turn.action_class for turn in trace.turns}),
            min(length, READABLE_TURNS[0]),
        )

    return max(traces, key=rank)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Turn weights of one iteration's trajectories.

    Attributes:
        iteration: the training iteration.
        traces: every trajectory that was trained.
    """

    iteration: int
    traces: Sequence[Trace]

    @property
    def shown(self) -> list[Trace]:
        """The successful trajectories, as in the paper's Figure 3; all of them where none succeeded."""
        return [trace for trace in self.traces if trace.success] or list(self.traces)


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that had another value from some iteration on, because the run was resumed with it.

    Attributes:
        iteration: the first one with the new value, counted from 1.
        name: of the setting.
        before: its value up to then; ``None`` also where it was not recorded.
        after: its value from then on, likewise.
    """

    iteration: int
    name: str
    before: Any
    after: Any


@dataclass(slots=True)
class RunRecord:
    """One run, or one trial of a sweep.

    Attributes:
        path: its folder.
        title: of a trial, Tune's id of it.
        method: the method's title; empty where it is not recorded.
        backbone: what the first policy is called; empty where it is not recorded.
        seed: ``None`` where it is not recorded.
        state: ``done``, ``running``, ``interrupted`` or ``failed``; empty where it is not recorded.
        environments: adapters of what the run played, by the name in its metrics and records; an adapter of the user's is known by
            what the run recorded of it.
        max_staleness: updates by which training on a rollout may come after its recording.
        settings: every setting that the run recorded, as its newest iteration had it.
        changes: settings that had other values in earlier iterations, in order.
        parameters: of a trial, what the sweep chose for it.
        metrics: flat metrics, one mapping an iteration, in order.
        evaluations: by environment, ``""`` where the run has a single one, and by the iterations that the policy was trained
            for, 0 before training.
        cost: the cost card, rows of label, figure and share of the run's time.
        allocation: turn weights of the newest iteration that recorded some.
        hindsight_start: iteration from which the dense term acts; ``None`` for methods without one.
        recorded: iterations to read trajectories of.
        tokens: texts of the run's tokens; ``None`` where they were not asked for, or the run has no tokenizer yet.
        versions: of packages, Python and platform.
        missing: what could not be read, and why, one sentence each.
    """

    path: Path
    title: str = ""
    method: str = ""
    backbone: str = ""
    seed: int | None = None
    state: str = ""
    environments: Mapping[str, EnvironmentAdapter] = field(default_factory=dict)
    max_staleness: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[SettingChange] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, float]] = ()
    evaluations: dict[str, dict[int, EvaluationResult]] = field(default_factory=dict)
    cost: Sequence[Sequence[str]] = ()
    allocation: Allocation | None = None
    hindsight_start: int | None = None
    recorded: Sequence[int] = ()
    tokens: TokenTexts | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def read(self, iteration: int) -> list[RecordedTrajectory]:
        """The recorded trajectories of one iteration; errors as :func:`read_recorded`."""
        return read_recorded(self.path, iteration, self.max_staleness, self.environments)

    @property
    def name(self) -> str:
        """How the report calls it: by its title, else by its folder."""
        return self.title or self.path.name

    @property
    def iterations(self) -> int:
        """Iterations trained, as far as metrics and evaluations go."""
        evaluated = (iteration for played in self.evaluations.values() for iteration in played)
        return max((*(int(line["iteration"]) for line in self.metrics), *evaluated), default=0)

    @property
    def before(self) -> dict[str, EvaluationResult]:
        """Evaluations before training, by environment."""
        return {name: played[0] for name, played in self.evaluations.items() if 0 in played}

    @property
    def after(self) -> dict[str, EvaluationResult]:
        """The newest evaluations of the trained policy, by environment; of which iteration :meth:`evaluated_after` gives."""
        return {name: played[max(played)] for name, played in self.evaluations.items() if max(played)}

    def evaluated_after(self, name: str) -> int:
        """Iterations trained before the newest evaluation in an environment; 0 before training."""
        return max(self.evaluations[name])

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show: no iteration and no evaluation."""
        return not (self.metrics or self.evaluations)


OF_THE_RECORDING = frozenset({"trajectories_folder", "training_folder", "max_recorded_tokens"})
"""Settings that say what is recorded and where, which does not change what a run is."""
OF_A_RUN = OF_THE_RECORDING | {"seed"}
"""Settings in which runs of one group may differ."""


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs with equal settings.

    Attributes:
        name: unique among the groups of a report.
        runs: in the order of their seeds.
    """

    name: str
    runs: Sequence[RunRecord]

    @property
    def seeds(self) -> str:
        """``seed 0``, ``3 seeds``, or nothing where none is known."""
        seeds = {run.seed for run in self.runs}
        if len(self.runs) > 1:
            return f"{len(seeds)} seeds" if len(seeds) == len(self.runs) else f"{len(self.runs)} runs"
        return "" if seeds == {None} else f"seed {self.runs[0].seed}"

    @property
    def title(self) -> str:
        """Name and seeds."""
        return f"{self.name} ({self.seeds})" if self.seeds else self.name

    def title_of(self, runs: Sequence[RunRecord]) -> str:
        """The title of a number that is of these runs of the group: of fewer than all, it says of how many."""
        return self.title if len(runs) == len(self.runs) else f"{self.name} ({len(runs)} of {self.seeds})"

    @property
    def hindsight_start(self) -> int | None:
        """Iteration from which the dense term acts."""
        return self.runs[0].hindsight_start


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Groups in the order in which their first runs come.

    A group is named by its method; where that is not enough, by the settings in which groups differ; else by the folder.
    """
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    members = [sorted(group, key=lambda run: -1 if run.seed is None else run.seed) for group in found.values()]
    return [RunGroup(name, group) for name, group in zip(_names(members), members, strict=True)]


def run_label(run: RunRecord, group: RunGroup) -> str:
    """How a run of a group is called in a chart: by its seed where that tells it from the others, else by its folder."""
    alone = sum(other.seed == run.seed for other in group.runs) == 1
    return f"seed {run.seed}" if alone and run.seed is not None else run.name


def listed(values: Sequence[object]) -> str:
    """Values, each once, as a sentence lists them: ``4, 5 and 6``."""
    *most, last = dict.fromkeys(map(str, values))
    return f"{', '.join(most)} and {last}" if most else last


def recorded_iterations(runs: Sequence[RunRecord]) -> str:
    """Iterations of the recorded turn weights of some runs; each has recorded some."""
    numbers = [run.allocation.iteration for run in runs if run.allocation]
    return f"iteration{'s' if len(set(numbers)) > 1 else ''} {listed(numbers)}"


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Settings that not all of the runs have alike, in alphabetical order."""
    keys = sorted({key for run in runs for key in (*run.settings, *run.parameters)} - OF_A_RUN)
    return [key for key in keys if len({_text(_setting(run, key)) for run in runs}) > 1]


def setting_text(run: RunRecord, key: str) -> str:
    """A setting's value as a reader would write it; a dash where the run has none of the name."""
    return value_text(_setting(run, key))


def value_text(value: Any) -> str:
    """A value as a reader would write it; a dash for ``None``."""
    return "–" if value is None else value if isinstance(value, str) else _text(value)


def _setting(run: RunRecord, key: str) -> Any:
    return run.parameters.get(key, run.settings.get(key))


def _identity(run: RunRecord) -> str:
    if not run.settings and not run.parameters:
        return str(run.path)  # nothing says that another run was like it
    changes = [(each.iteration, each.name, each.before) for each in run.changes if each.name not in OF_A_RUN]
    return _text([run.method, run.backbone, _without_seed(run.settings), _without_seed(run.parameters), changes])


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in OF_A_RUN}


def _names(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    firsts = [group[0] for group in groups]
    methods = [run.method or ("" if run.parameters else run.name) for run in firsts]
    if len(set(methods)) == len(methods) and "" not in methods:
        return methods
    differing = differing_settings(firsts)
    names = []
    for run, method in zip(firsts, methods, strict=True):
        alike = [other for other, title in zip(firsts, methods, strict=True) if title == method]
        own = [key for key in differing if len({_text(_setting(other, key)) for other in alike}) > 1]
        values = ", ".join(f"{key} {setting_text(run, key)}" for key in own[:3])
        names.append(", ".join(part for part in (method, values) if part))
    if len(set(names)) < len(names) or "" in names:
        names = [run.name for run in firsts]
    return names if len(set(names)) == len(names) else [str(run.path) for run in firsts]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
