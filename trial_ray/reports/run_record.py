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
        lost: groups that were trained, but are not among the recorded trajectories.
    """

    iteration: int
    traces: Sequence[Trace]
    lost: int = 0

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
        environments: what the run played.
        settings: every setting that the run recorded, as its newest iteration had it.
        changes: settings that had other values in earlier iterations, in order.
        parameters: of a trial, what the sweep chose for it.
        metrics: flat metrics, one mapping an iteration, in order.
        evaluations: by environment, ``""`` where the run has a single one, and by the iterations that the policy was trained
            for, 0 before training.
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
    changes: Sequence[SettingChange] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, float]] = ()
    evaluations: dict[str, dict[int, EvaluationResult]] = field(default_factory=dict)
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
