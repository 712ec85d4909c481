"""Comparisons of the paper: studies of several methods and seeds, one sweep each, and tables and figures of their runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.rllib.utils import force_list

from trial_ray.algorithms.config import NAMED_CONFIG
from trial_ray.algorithms.methods import method_title, with_method
from trial_ray.errors import ConfigError, UserInputError
from trial_ray.evaluation.evaluation_sets import choose_evaluation_set
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.tables import ResultTable, TableEntry
from trial_ray.files import examples_folder
from trial_ray.metrics import TRAINING_SUCCESS
from trial_ray.ray_internals import trial_folder
from trial_ray.runs.config_record import to_record
from trial_ray.runs.evaluations import set_file
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.overrides import apply_overrides
from trial_ray.sweeps.plan import SweepFile, recorded_config
from trial_ray.user_files import run_user_file

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO, GRPOConfig
    from trial_ray.algorithms.methods.trial import TRIALConfig


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """An evaluation set that the trained policy plays at the end.

    Attributes:
        split: the environment's split.
        evaluation_set: name for ``trial_ray.evaluation.evaluation_sets.choose_evaluation_set``, or number of tasks.
    """

    split: str
    evaluation_set: str | int = "full"


@dataclass(frozen=True, slots=True)
class Scale:
    """The ``scale`` of a scale file.

    Attributes:
        configure: returns TRIAL's config of a run for an environment and a backbone; other methods keep its changes to the
            defaults.
        environments: evaluation sets played at the end, by name of the environment.
        backbones: names, in the order of the rows.
        controlled_backbone: backbone of controlled studies.
        iterations: iterations of every run.
        seeds: number of seeds, unless ``--seeds`` sets another.
        method_settings: further settings by method at this scale, such as a schedule that fits into fewer iterations.
        method_seeds: number of seeds by method, in place of ``seeds``.
    """

    configure: Callable[[str, str], TRIALConfig]
    environments: Mapping[str, tuple[EvaluationSet, ...]]
    backbones: tuple[str, ...]
    controlled_backbone: str
    iterations: int
    seeds: int
    method_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    method_seeds: Mapping[str, int] = field(default_factory=dict)


def scale_names() -> list[str]:
    """Return the names of the scales in this package, the smallest first."""
    return [
        "tiny",
        "study",
        "shape",
        "guessing",
        "webshop",
        "pretrained",
        "pretrained_tools",
        "small",
        "paper",
    ]


def scale_file(name: str) -> Path:
    """Return the file of a scale: a name from :func:`scale_names`, or a path that ends in ``.py``.

    Raises:
        UserInputError: the file does not exist.
    """
    path = Path(name).expanduser() if name.endswith(".py") else examples_folder() / "reproduce" / f"{name}.py"
    if not path.is_file():
        raise UserInputError(
            f"There is no scale {name!r} ({path} is not a file). Choose one of {', '.join(scale_names())}, or name a Python "
            "file that defines `scale`."
        )
    return path


def load_scale(name: str) -> Scale:
    """Run a scale file and return its ``scale``.

    Raises:
        UserInputError: the file is missing, fails, or defines no ``scale``.
    """
    path = scale_file(name)
    scale = run_user_file(path, "trial_ray_scale").get("scale")
    if not isinstance(scale, Scale):
        raise UserInputError(f"{path} must define `scale`, a trial_ray.reproduction.Scale, got {type(scale).__name__}.")
    return scale


@dataclass(frozen=True, slots=True)
class Study:
    """One comparison of the paper.

    Attributes:
        title: subject of the comparison.
        methods: rows or curves, in the paper's order.
        controlled: only the scale's controlled backbone is trained; otherwise every backbone.
    """

    title: str
    methods: tuple[str, ...]
    controlled: bool = True


STUDIES = {
    "table2": Study(
        "complete-set results of all methods", ("grpo", "serl", "sdar", "grpo_opsd", "rlsd", "trial"), controlled=False
    ),
    "table3": Study("controlled revision profiles", ("grpo", "uniform", "permuted", "trial")),
    "study": Study(
        "turn profiles and methods where the hindsight view knows better",
        ("grpo", "uniform", "permuted", "trial", "serl", "sdar", "rlsd", "grpo_opsd", "gigpo"),
    ),
    "shape": Study(
        "turn profiles from several warm starts", ("grpo", "uniform", "permuted", "trial"), controlled=False
    ),
    "pair": Study("TRIAL against GRPO", ("grpo", "trial")),
}
"""Studies by their names for ``trial-ray reproduce``."""
REFERENCE, SUBJECT = "grpo", "trial"


@dataclass(frozen=True)
class FinalEvaluation:
    """RLlib callback ``on_train_result``: plays a trial's evaluation sets after its last iteration, and saves the results.

    The results are saved in the trial's run folder.

    Attributes:
        sets: evaluation sets to play.
        iterations: the last iteration.
        labels: labels of the results.
    """

    sets: tuple[EvaluationSet, ...]
    iterations: int
    labels: Mapping[str, Any]

    def __call__(self, *, algorithm: GRPO, **_: Any) -> None:
        """Play the evaluation sets after the last iteration."""
        folder = trial_folder(algorithm)
        if algorithm.iteration < self.iterations or folder is None:
            return
        config = algorithm.config
        (entry,) = config.environment_entries()
        for played in self.sets:
            own = entry.with_config(**config.evaluation_env_config, split=played.split)
            result = algorithm.evaluate_set(choose_evaluation_set(own, played.evaluation_set), own)
            result.policy, result.labels = f"{folder.name}, iteration {self.iterations}", dict(self.labels)
            result.save(evaluation_file(folder, played, self.iterations))


def evaluation_file(folder: Path, played: EvaluationSet, iterations: int) -> Path:
    """Return the file of a run's evaluation of a set after ``iterations`` iterations."""
    return RunFolder(folder).evaluations / set_file(f"{played.split}-{played.evaluation_set}", iterations)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a study; its config plays ``sets`` at the end."""

    environment: str
    backbone: str
    method: str
    seed: int
    config: GRPOConfig
    sets: tuple[EvaluationSet, ...]

    @property
    def name(self) -> str:
        """Name of its folder, without characters that Tune replaces in the names of folders."""
        name = f"{self.environment}-{self.backbone}-{self.method}-seed{self.seed}".lower()
        return re.sub(r'[/()<>:"\\|?*]', "_", name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the run in the sweep's tables."""
        return {name: getattr(self, name) for name in ("environment", "backbone", "method", "seed")}


@dataclass(frozen=True)
class StudySweep(SweepFile):
    """A study as a sweep: a grid of whole configs, over environments, backbones, methods and seeds.

    Attributes:
        runs: planned runs by name.
    """

    runs: Mapping[str, PlannedRun] = field(default_factory=dict)

    @classmethod
    def plan(
        cls, study: Study, scale: Scale, path: Path, seeds: int | None, iterations: int | None, overrides: list[str]
    ) -> StudySweep:
        """Plan every run that ``study`` needs at ``scale``.

        Args:
            study: the study.
            scale: the scale.
            path: path of the scale file.
            seeds: number of seeds; ``None``: the scale's.
            iterations: iterations of every run; ``None``: the scale's.
            overrides: ``key=value`` for every run, applied to TRIAL's config; other methods take over the settings that they share.

        Raises:
            ConfigError: a config is wrong, a method's schedule is longer than the run, or two runs have one name.
        """
        steps = iterations or scale.iterations
        planned = list(_planned(study, scale, seeds, steps, overrides))
        runs = {run.name: run for run in planned}
        if len(runs) < len(planned):
            raise ConfigError(
                f"Two runs would have the same folder; {path} needs names that differ: {', '.join(scale.backbones)}."
            )
        return cls(
            path=path,
            config=next(iter(runs.values())).config,
            stop={"training_iteration": steps},
            searched=dict.fromkeys(("environment", "backbone", "method", "seed")),
            metric=TRAINING_SUCCESS,
            mode="max",
            num_samples=1,
            scheduler=None,
            search_alg=None,
            max_concurrent_trials=None,
            iterations=iterations,
            overrides=tuple(overrides),
            runs=runs,
        )

    @property
    def num_trials(self) -> int:
        """Number of trials, one per run."""
        return len(self.runs)

    @property
    def repeats(self) -> int:
        """Smallest number of seeds of a method."""
        counted = Counter((run.environment, run.backbone, run.method) for run in self.runs.values())
        return min(counted.values())

    def configs(self) -> Iterator[GRPOConfig]:
        """Return the configs of all runs."""
        return (run.config for run in self.runs.values())

    def param_space(self) -> dict[str, Any]:
        """Return a grid over names and configs."""
        named = [(name, recorded_config(run.config).to_dict()) for name, run in self.runs.items()]
        return {NAMED_CONFIG: {"grid_search": named}}

    def parameters(self, result: Any) -> dict[str, Any]:
        """Return environment, backbone, method and seed of a trial; its folder has the name of its run."""
        return self.runs[Path(result.path).name].parameters

    @property
    def trial_name(self) -> Callable[[Any], str]:
        """Function that names a trial after its run."""
        return _name_of

    def description(self) -> dict[str, Any]:
        """Return every run's method and settings, and the stop criterion."""
        records = {name: to_record(run.config) for name, run in self.runs.items()}
        runs = {name: {"method": record["method"], **record["settings"]} for name, record in records.items()}
        return {"stop": self.stop, **runs}


def _name_of(trial: Any) -> str:
    return str(trial.config[NAMED_CONFIG][0])


def _planned(study: Study, scale: Scale, seeds: int | None, steps: int, overrides: list[str]) -> Iterator[PlannedRun]:
    backbones = (scale.controlled_backbone,) if study.controlled else scale.backbones
    for environment, sets in scale.environments.items():
        for backbone in backbones:
            base = apply_overrides(scale.configure(environment, backbone), overrides)
            for method in study.methods:
                for seed in range(seeds or scale.method_seeds.get(method, scale.seeds)):
                    config: GRPOConfig = with_method(base, method).training(**scale.method_settings.get(method, {}))
                    labels = {"method": method, "backbone": backbone, "seed": seed, "iteration": steps}
                    own = force_list(config.callbacks_on_train_result)
                    config.debugging(seed=seed).callbacks(on_train_result=[*own, FinalEvaluation(sets, steps, labels)])
                    config.validate()
                    config.require_schedules_within(steps)
                    yield PlannedRun(environment, backbone, method, seed, config, sets)


def result_table(sweep: StudySweep, folder: Path) -> ResultTable:
    """Return the table of the evaluated runs, with backbones in the scale's order.

    Raises:
        UserInputError: no run has been evaluated.
    """
    steps = int(sweep.stop["training_iteration"])
    entries = [
        TableEntry(run.backbone, run.method, run.seed, EvaluationResult.load(file))
        for name, run in sorted(sweep.runs.items(), key=lambda item: _backbones(sweep).index(item[1].backbone))
        for played in run.sets
        if (file := evaluation_file(folder / name, played, steps)).is_file()
    ]
    if not entries:
        raise UserInputError(
            f"None of the {len(sweep.runs)} runs in {folder} has been evaluated, so there is no table."
        )
    reference = REFERENCE if any(entry.method == REFERENCE for entry in entries) else None
    return ResultTable(entries, reference, SUBJECT)


def _backbones(sweep: StudySweep) -> list[str]:
    return list(dict.fromkeys(run.backbone for run in sweep.runs.values()))


def write_results(name: str, sweep: StudySweep, folder: Path) -> list[Path]:
    """Write the study's table and, for each environment and backbone, every curve and the paper's Figures 2 and 3.

    Args:
        name: name of the study.
        sweep: the study.
        folder: folder of the sweep.

    Returns:
        The written files.

    Raises:
        UserInputError: no run has been evaluated.
        MissingDependencyError: matplotlib is not installed.
    """
    from trial_ray.reports.plots import write_figures
    from trial_ray.reports.report import load_groups

    written = result_table(sweep, folder).write(folder / name, method_title)
    places: dict[tuple[str, str], list[Path]] = {}
    for run in sweep.runs.values():
        if (folder / run.name / "run.json").is_file():
            places.setdefault((run.environment, run.backbone), []).append(folder / run.name)
    for place, runs in places.items():
        written += write_figures(load_groups(runs), folder / "figures" / "-".join(place).lower())
    return written


def state(folder: Path) -> str:
    """Return the state of the run in a folder; ``new`` if there is no run."""
    return RunFolder(folder).state() if (folder / "run.json").is_file() else "new"
