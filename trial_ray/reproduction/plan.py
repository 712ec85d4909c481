"""What each table and figure compares, the runs behind it, and how far each of them is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import with_method
from trial_ray.errors import CheckpointError, UserInputError
from trial_ray.experiments.checkpoints import list_checkpoints
from trial_ray.experiments.config_record import to_record
from trial_ray.experiments.overrides import apply_overrides
from trial_ray.experiments.run_folder import RunFolder
from trial_ray.reproduction.scale import EvaluationSet, Scale

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo_config import GRPOConfig
    from trial_ray.environments.entry import EnvironmentEntry

# What is written, and where, does not change what a run is.
NOT_COMPARED = ("trajectories_folder", "training_folder", "max_recorded_tokens")


@dataclass(frozen=True, slots=True)
class Study:
    """One table or figure of the paper.

    Attributes:
        title: what it shows.
        methods: rows or curves, in the paper's order.
        controlled: only the scale's controlled backbone is trained; otherwise every backbone.
        environments: only these of the scale's; ``None`` takes all.
    """

    title: str
    methods: tuple[str, ...]
    controlled: bool = True
    environments: tuple[str, ...] | None = None


STUDIES = {
    "table2": Study(
        "complete-set results of all methods", ("grpo", "serl", "sdar", "grpo_opsd", "rlsd", "trial"), controlled=False
    ),
    "table3": Study("controlled revision profiles", ("grpo", "uniform", "permuted", "trial")),
    "figure2": Study("validation and allocation dynamics", ("grpo", "trial"), environments=("alfworld",)),
    "figure3": Study(
        "allocation over a trajectory, and two policies on one game", ("grpo", "trial"), environments=("alfworld",)
    ),
}
"""By the name that ``trial-ray reproduce`` takes; runs are shared between them."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One training run of a study.

    Attributes:
        environment: the scale's name of it.
        backbone: the scale's name of it.
        method: a method's name.
        seed: of the run.
        config: validated, with its trajectories recorded in :attr:`folder`.
        iterations: to train.
        sets: to evaluate at the end.
        folder: its run folder, shared by all studies of one output folder.
    """

    environment: str
    backbone: str
    method: str
    seed: int
    config: GRPOConfig
    iterations: int
    sets: tuple[EvaluationSet, ...]
    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    def evaluation(self, evaluated: EvaluationSet) -> Path:
        """Where the final evaluation of a set is written."""
        return RunFolder(self.folder).evaluations / f"{set_name(evaluated)}_{self.iterations:06d}.json"

    def entry(self, evaluated: EvaluationSet) -> EnvironmentEntry:
        """What a set is played in: the run's environment with the keyword arguments of its panel."""
        (entry,) = self.config.environment_entries()
        return entry.at(**self.config.panel_env_config, split=evaluated.split)

    def state(self) -> str:
        """``done``, ``unfinished``, or ``new``.

        Raises:
            UserInputError: the folder holds a run of another config, or one that was trained for longer.
        """
        if not self.folder.exists():
            return "new"
        folder = RunFolder.reopen(self.folder)
        self._require_same_config(folder)
        trained = [int(path.name) for path in list_checkpoints(folder.checkpoints)]
        if trained and trained[-1] > self.iterations:
            raise UserInputError(
                f"{self.folder} was trained for {trained[-1]} iterations; this study wants {self.iterations}. "
                "Name another folder with --out."
            )
        complete = all(self.evaluation(evaluated).is_file() for evaluated in self.sets)
        return "done" if complete and folder.state() == "done" else "unfinished"

    def _require_same_config(self, folder: RunFolder) -> None:
        path = folder.path / "resolved_config.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            theirs = {**found["settings"], "method": found["method"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"Cannot read the resolved config {path}: {error}.") from error
        record = json.loads(json.dumps(to_record(self.config)))
        ours = {**record["settings"], "method": record["method"]}
        for key in sorted((theirs.keys() | ours.keys()) - set(NOT_COMPARED)):
            if theirs.get(key) != ours.get(key):
                raise UserInputError(
                    f"{folder.path} holds a run of another config: {key} is {theirs.get(key)!r} there and "
                    f"{ours.get(key)!r} here. Name another folder with --out, or delete this one."
                )


def set_name(evaluated: EvaluationSet) -> str:
    """Name of a set's evaluation file."""
    return f"{evaluated.split}-{evaluated.panel}"


def plan_runs(
    study: Study,
    scale: Scale,
    folder: Path,
    *,
    seeds: int | None = None,
    iterations: int | None = None,
    overrides: list[str] | None = None,
) -> list[PlannedRun]:
    """Every run that ``study`` needs at ``scale``, by environment, backbone, method and seed.

    Args:
        study: what is compared.
        scale: with what.
        folder: runs lie below it in ``runs/``.
        seeds: how many; default the scale's.
        iterations: default the scale's.
        overrides: ``key=value`` for every run, applied to TRIAL's config; other methods take over what they share.

    Raises:
        ConfigError: a config is wrong, or a method's schedule is longer than the run.
        UserInputError: the scale lacks an environment of the study.
    """
    steps = iterations or scale.iterations
    backbones = (scale.controlled_backbone,) if study.controlled else scale.backbones
    runs = []
    for environment in study.environments or tuple(scale.environments):
        if environment not in scale.environments:
            raise UserInputError(
                f"The scale has no environment {environment!r}; found {', '.join(scale.environments)}."
            )
        for backbone in backbones:
            base = apply_overrides(scale.configure(environment, backbone), overrides or [])
            for method in study.methods:
                for seed in range(seeds or scale.seeds):
                    path = folder / "runs" / f"{environment}-{backbone}-{method}-seed{seed}".lower()
                    config = _configure(base, method, scale.method_settings.get(method, {}), seed, path)
                    config.require_schedules_within(steps)
                    sets = tuple(scale.environments[environment])
                    runs.append(PlannedRun(environment, backbone, method, seed, config, steps, sets, path))
    return runs


def _configure(base: GRPOConfig, method: str, settings: Any, seed: int, path: Path) -> GRPOConfig:
    config: GRPOConfig = with_method(base, method).training(**settings).debugging(seed=seed)
    RunFolder(path).configure(config)
    config.validate()
    return config
