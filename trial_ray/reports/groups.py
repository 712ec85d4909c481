"""Runs grouped by all but their seed, and how groups and runs are called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_ray.runs.config_record import OF_THE_RECORDING

if TYPE_CHECKING:
    from trial_ray.reports.run import RecordedRun

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
    runs: Sequence[RecordedRun]

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

    def title_of(self, runs: Sequence[RecordedRun]) -> str:
        """The title of a number that is of these runs of the group: of fewer than all, it says of how many."""
        return self.title if len(runs) == len(self.runs) else f"{self.name} ({len(runs)} of {self.seeds})"

    @property
    def hindsight_start(self) -> int | None:
        """Iteration from which the dense term acts."""
        return self.runs[0].config.hindsight_start


def group_runs(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """Groups in the order in which their first runs come.

    A group is named by its method; where that is not enough, by the settings in which groups differ; else by the folder.
    """
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    members = [sorted(group, key=lambda run: -1 if run.seed is None else run.seed) for group in found.values()]
    return [RunGroup(name, group) for name, group in zip(_names(members), members, strict=True)]


def run_label(run: RecordedRun, group: RunGroup) -> str:
    """How a run of a group is called in a chart: by its seed where that tells it from the others, else by its folder."""
    alone = sum(other.seed == run.seed for other in group.runs) == 1
    return f"seed {run.seed}" if alone and run.seed is not None else run.name


def listed(values: Sequence[object]) -> str:
    """Values, each once, as a sentence lists them: ``4, 5 and 6``."""
    *most, last = dict.fromkeys(map(str, values))
    return f"{', '.join(most)} and {last}" if most else last


def recorded_iterations(runs: Sequence[RecordedRun]) -> str:
    """Iterations of the recorded turn weights of some runs; each has recorded some."""
    numbers = [run.allocation.iteration for run in runs if run.allocation]
    return f"iteration{'s' if len(set(numbers)) > 1 else ''} {listed(numbers)}"


def differing_settings(runs: Sequence[RecordedRun]) -> list[str]:
    """Settings that not all of the runs have alike, in alphabetical order."""
    keys = sorted({key for run in runs for key in (*run.config.settings, *run.parameters)} - OF_A_RUN)
    return [key for key in keys if len({_text(_setting(run, key)) for run in runs}) > 1]


def setting_text(run: RecordedRun, key: str) -> str:
    """A setting's value as a reader would write it; a dash where the run has none of the name."""
    return value_text(_setting(run, key))


def value_text(value: Any) -> str:
    """A value as a reader would write it; a dash for ``None``."""
    return "–" if value is None else value if isinstance(value, str) else _text(value)


def _setting(run: RecordedRun, key: str) -> Any:
    return run.parameters.get(key, run.config.settings.get(key))


def _identity(run: RecordedRun) -> str:
    if not run.config.settings and not run.parameters:
        return str(run.path)  # nothing says that another run was like it
    changes = [(each.iteration, each.name, each.before) for each in run.config.changes if each.name not in OF_A_RUN]
    return _text(
        [run.config.method, run.config.backbone, *map(_without_seed, (run.config.settings, run.parameters)), changes]
    )


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in OF_A_RUN}


def _names(groups: Sequence[Sequence[RecordedRun]]) -> list[str]:
    firsts = [group[0] for group in groups]
    methods = [run.config.method or ("" if run.parameters else run.name) for run in firsts]
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
