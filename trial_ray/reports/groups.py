"""Groups of runs that differ only in their seed, and texts about groups, runs and settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_ray.runs.config_record import RECORDING_SETTINGS

if TYPE_CHECKING:
    from trial_ray.runs.reader import RecordedRun

RUN_SETTINGS = RECORDING_SETTINGS | {"seed", "chat_template_date"}
"""Settings that may differ between the runs of a :class:`RunGroup`; ``chat_template_date`` is the day on which a run started."""


@dataclass(frozen=True)
class RunGroup:
    """A group of runs with equal settings, except for :data:`RUN_SETTINGS`.

    Attributes:
        name: name of the group, unique among the groups of a report.
        runs: runs in the order of their seeds.
    """

    name: str
    runs: Sequence[RecordedRun]

    @property
    def title(self) -> str:
        """Name of this group of runs, with their seed or their number, such as ``GRPO (3 seeds)``."""
        return self.title_of(self.runs)

    def title_of(self, runs: Sequence[RecordedRun]) -> str:
        """Return the group's title for a chart or table row that shows only ``runs``, such as ``GRPO (2 of 3 seeds)``."""
        seeds = {run.seed for run in self.runs}
        members = f"{len(self.runs)} {'seeds' if len(seeds) == len(self.runs) else 'runs'}"
        if len(self.runs) == 1:
            members = "" if seeds == {None} else f"seed {self.runs[0].seed}"
        if len(runs) < len(self.runs):
            members = f"{len(runs)} of {members}"
        return f"{self.name} ({members})" if members else self.name


def group_runs(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """Group runs with equal settings, in the order of the groups' first runs.

    A group is named after its method and, if several groups have this method, after settings in which these groups differ. If
    such names are not unique, each group is named after its first run.
    """
    by_settings: dict[str, list[RecordedRun]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in RUN_SETTINGS}
        changes = [
            (change.iteration, change.name, change.before)
            for change in run.config.changes
            if change.name not in RUN_SETTINGS
        ]
        key = json.dumps([run.config.method, run.config.backbone, settings, changes], sort_keys=True, default=str)
        # A run without recorded settings is a separate group, because its settings are unknown.
        by_settings.setdefault(key if run.settings else str(run.path), []).append(run)
    groups = [sorted(group, key=lambda run: -1 if run.seed is None else run.seed) for group in by_settings.values()]
    return [RunGroup(name, group) for name, group in zip(_names([group[0] for group in groups]), groups, strict=True)]


def _names(firsts: Sequence[RecordedRun]) -> list[str]:
    methods = [run.config.method or ("" if run.parameters else run.name) for run in firsts]
    with_settings = []
    for run, method in zip(firsts, methods, strict=True):
        keys = differing_settings([other for other, title in zip(firsts, methods, strict=True) if title == method])[:3]
        settings = [f"{key} {value_text(run.settings.get(key))}" for key in keys]
        with_settings.append(", ".join([method, *settings]).removeprefix(", "))
    for names in (with_settings, [run.name for run in firsts]):
        if len({*names, ""}) > len(names):  # All names are different, and none is empty.
            return names
    return [str(run.path) for run in firsts]


def run_label(run: RecordedRun, group: RunGroup) -> str:
    """Return a run's label in a chart of its group: its seed if no other run of the group has this seed, else its name."""
    unique = sum(other.seed == run.seed for other in group.runs) == 1
    return f"seed {run.seed}" if unique and run.seed is not None else run.name


def listed(values: Sequence[object]) -> str:
    """Return the distinct values as an enumeration, such as ``4, 5 and 6``."""
    *first, last = dict.fromkeys(map(str, values))
    return f"{', '.join(first)} and {last}" if first else last


def recorded_iterations(runs: Sequence[RecordedRun]) -> str:
    """Return text such as ``iterations 20 and 25``: the iterations of the turn weights in the runs' attribute ``allocation``."""
    numbers = [run.allocation[0].iteration for run in runs]
    return f"iteration{'s' if len(set(numbers)) > 1 else ''} {listed(numbers)}"


def differing_settings(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the settings that differ between the runs, in alphabetical order."""
    keys = sorted({key for run in runs for key in run.settings} - RUN_SETTINGS)
    return [key for key in keys if len({value_text(run.settings.get(key)) for run in runs}) > 1]


def value_text(value: Any) -> str:
    """Return a value as text; a dash for ``None``."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
