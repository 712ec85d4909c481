"""Groups of runs that differ only in their seed, and names of groups and runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_ray.runs.config_record import RECORDING_SETTINGS

if TYPE_CHECKING:
    from trial_ray.runs.reader import RecordedRun

OF_A_RUN = RECORDING_SETTINGS | {"seed", "chat_template_date"}
"""Settings that may differ between the runs of one group; the date is the day on which a run started."""


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs with equal settings.

    Attributes:
        name: unique among the groups of a report.
        runs: runs in the order of their seeds.
    """

    name: str
    runs: Sequence[RecordedRun]

    @property
    def title(self) -> str:
        """Name of the group, with its seeds."""
        return self.title_of(self.runs)

    def title_of(self, runs: Sequence[RecordedRun]) -> str:
        """Title for a result of these runs of the group; it states their number if they are not all runs of the group."""
        seeds = {run.seed for run in self.runs}
        known = f"{len(self.runs)} {'seeds' if len(seeds) == len(self.runs) else 'runs'}"
        if len(self.runs) == 1:
            known = "" if seeds == {None} else f"seed {self.runs[0].seed}"
        if len(runs) < len(self.runs):
            known = f"{len(runs)} of {known}"
        return f"{self.name} ({known})" if known else self.name


def group_runs(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """Group runs with equal settings, in the order of the groups' first runs.

    A group is named after its method; if that is ambiguous, also after the settings that differ between groups; else after the
    folder.
    """
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in OF_A_RUN}
        changes = [(each.iteration, each.name, each.before) for each in run.config.changes if each.name not in OF_A_RUN]
        alike = json.dumps([run.config.method, run.config.backbone, settings, changes], sort_keys=True, default=str)
        # Nothing says that another run was like one without settings.
        found.setdefault(alike if run.settings else str(run.path), []).append(run)
    members = [sorted(group, key=lambda run: -1 if run.seed is None else run.seed) for group in found.values()]
    return [RunGroup(name, group) for name, group in zip(_names([group[0] for group in members]), members, strict=True)]


def _names(firsts: Sequence[RecordedRun]) -> list[str]:
    methods = [run.config.method or ("" if run.parameters else run.name) for run in firsts]
    named = []
    for run, method in zip(firsts, methods, strict=True):
        own = differing_settings([other for other, title in zip(firsts, methods, strict=True) if title == method])
        named.append(", ".join([method, *(f"{key} {setting_text(run, key)}" for key in own[:3])]).removeprefix(", "))
    for names in (named, [run.name for run in firsts]):
        if len({*names, ""}) > len(names):
            return names
    return [str(run.path) for run in firsts]


def run_label(run: RecordedRun, group: RunGroup) -> str:
    """Label of a run in a chart of its group: its seed if no other run of the group has it, else the run's name."""
    alone = sum(other.seed == run.seed for other in group.runs) == 1
    return f"seed {run.seed}" if alone and run.seed is not None else run.name


def listed(values: Sequence[object]) -> str:
    """Format values as a list in a sentence, each once: ``4, 5 and 6``."""
    *most, last = dict.fromkeys(map(str, values))
    return f"{', '.join(most)} and {last}" if most else last


def recorded_iterations(runs: Sequence[RecordedRun]) -> str:
    """Text with the iterations of the recorded turn weights of some runs, which all must have recorded them."""
    numbers = [run.allocation[0].iteration for run in runs]
    return f"iteration{'s' if len(set(numbers)) > 1 else ''} {listed(numbers)}"


def differing_settings(runs: Sequence[RecordedRun]) -> list[str]:
    """Settings that are not equal in all of the runs, in alphabetical order."""
    keys = sorted({key for run in runs for key in run.settings} - OF_A_RUN)
    return [key for key in keys if len({setting_text(run, key) for run in runs}) > 1]


def setting_text(run: RecordedRun, key: str) -> str:
    """A setting's value as text; a dash if the run does not have the setting."""
    return value_text(run.settings.get(key))


def value_text(value: Any) -> str:
    """A value as text; a dash for ``None``."""
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
