"""What a report shows of one run, as plain values; ``trial_ray.experiments.recorded_run`` reads it from a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.reports.traces import Trace


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment of a run.

    Attributes:
        name: its name in the run's metrics and records.
        adapter: titles and action classes; an adapter of the user's is known by what the run recorded of it.
    """

    name: str
    adapter: EnvironmentAdapter

    @property
    def title(self) -> str:
        """How the report calls it."""
        return self.adapter.name


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
class CostRow:
    """One line of the cost card, in words.

    Attributes:
        label: what was measured.
        figure: its value with its unit.
        share: of the run's time; empty where that means nothing.
    """

    label: str
    figure: str
    share: str = ""


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
        environments: what the run played.
        settings: every setting that the run recorded.
        parameters: of a trial, what the sweep chose for it.
        metrics: flat metrics, one mapping an iteration, in order.
        before: evaluations before training by environment; ``""`` where the run has a single one.
        after: evaluations of the trained policy, likewise.
        seconds: time by phase, in seconds, by the phase's label.
        cost: the cost card, in sections.
        allocation: turn weights of the newest iteration that recorded some.
        hindsight_start: iteration from which the dense term acts; ``None`` for methods without one.
        versions: of packages, Python and platform.
        missing: what could not be read, and why, one sentence each.
    """

    path: Path
    title: str = ""
    method: str = ""
    backbone: str = ""
    seed: int | None = None
    state: str = ""
    environments: Sequence[Environment] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, float]] = ()
    before: Mapping[str, EvaluationResult] = field(default_factory=dict)
    after: Mapping[str, EvaluationResult] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    cost: Sequence[Sequence[CostRow]] = ()
    allocation: Allocation | None = None
    hindsight_start: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How the report calls it: by its title, else by its folder."""
        return self.title or self.path.name

    @property
    def iterations(self) -> int:
        """Iterations trained, as far as the metrics go."""
        return max((int(line["iteration"]) for line in self.metrics), default=0)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show: no iteration and no evaluation."""
        return not (self.metrics or self.before or self.after)
