"""Studies: comparisons of several methods over several seeds, as in the TRIAL paper, with tables and figures.

Each study is a sweep over whole configs.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from trial_ray.files import Json, Numbers, Record, examples_folder
from trial_ray.metrics import TRAINING_SUCCESS
from trial_ray.reports.plots import write_figures
from trial_ray.rllib_internals import trial_folder
from trial_ray.runs.checkpoints import RUN_FILE
from trial_ray.runs.config_record import to_record
from trial_ray.runs.evaluations import set_file
from trial_ray.runs.experiment import apply_overrides
from trial_ray.runs.folder import RunFolder
from trial_ray.sweeps.outputs import messages_of
from trial_ray.sweeps.plan import SweepPlan, recorded_config
from trial_ray.sweeps.results import SweepResult
from trial_ray.user_files import run_user_file

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO, GRPOConfig
    from trial_ray.algorithms.methods.trial import TRIALConfig


@dataclass(frozen=True)
class EvaluationSplit:
    """A split on which the trained policy is evaluated at the end.

    Attributes:
        split: the environment's split.
        tasks: number of tasks, or the name of an evaluation set for
            :func:`trial_ray.evaluation.evaluation_sets.choose_evaluation_set`.
    """

    split: str
    tasks: str | int = "full"

    def __str__(self) -> str:
        return f"{self.split}-{self.tasks}"


@dataclass(frozen=True)
class Scale:
    """Models, environments and length of a study; a scale file assigns one to ``scale``.

    Attributes:
        configure: function that returns TRIAL's config for the names of an environment and a model; other methods inherit the
            settings in it that differ from the defaults.
        environments: splits that are evaluated at the end, by name of the environment.
        backbones: the models, in the order of the tables' rows.
        controlled_backbone: the only model that is trained in a study whose :attr:`Study.controlled` is set.
        iterations: number of training iterations of every run.
        seeds: number of seeds, unless ``--seeds`` sets another.
        method_settings: further settings by method, such as a schedule for fewer iterations.
        method_seeds: number of seeds by method, in place of ``seeds``.
    """

    configure: Callable[[str, str], TRIALConfig]
    environments: Mapping[str, tuple[EvaluationSplit, ...]]
    backbones: tuple[str, ...]
    controlled_backbone: str
    iterations: int
    seeds: int
    method_settings: Mapping[str, Record] = field(default_factory=dict)
    method_seeds: Mapping[str, int] = field(default_factory=dict)


SCALES = ("tiny", "study", "shape", "guessing", "webshop", "pretrained", "small", "paper")
"""Names of the scales in this package (models, environments and length of a study), the smallest first."""


def scale_file(name: str) -> Path:
    """Return the path of a scale file (a study's size), given a name in :data:`SCALES` or a ``.py`` path.

    Raises:
        UserInputError: the file does not exist.
    """
    path = Path(name).expanduser() if name.endswith(".py") else examples_folder() / "reproduce" / f"{name}.py"
    if not path.is_file():
        raise UserInputError(
            f"There is no scale {name!r} ({path} is not a file). Choose one of {', '.join(SCALES)}, or name a Python "
            "file that defines `scale`."
        )
    return path


def load_scale(name: str) -> Scale:
    """Run a scale file and return its :class:`Scale`.

    Raises:
        UserInputError: the file is missing, fails, or defines no ``scale``.
    """
    path = scale_file(name)
    scale = run_user_file(path, "trial_ray_scale").get("scale")
    if not isinstance(scale, Scale):
        raise UserInputError(f"{path} must define `scale`, a trial_ray.sweeps.study.Scale, got {type(scale).__name__}.")
    return scale


@dataclass(frozen=True)
class Study:
    """One comparison of methods.

    Attributes:
        title: subject of the comparison.
        methods: methods to compare, in the order of the tables' rows and the figures' curves.
        controlled: whether only the model ``Scale.controlled_backbone`` is trained, instead of every model of the scale.
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
        "turn profiles and methods with an informative hindsight context",
        ("grpo", "uniform", "permuted", "trial", "serl", "sdar", "rlsd", "grpo_opsd", "gigpo"),
    ),
    "shape": Study(
        "turn profiles from several warm starts", ("grpo", "uniform", "permuted", "trial"), controlled=False
    ),
    "pair": Study("TRIAL against GRPO", ("grpo", "trial")),
    "league": Study(
        "the field's methods, none of them tuned, against GRPO",
        (
            "grpo",
            *("rloo", "dapo", "gspo", "cispo"),
            *("gigpo", "hgpo", "g2po", "rft", "trial", "uniform", "sdar", "serl", "stepopsd"),
        ),
    ),
}
"""Studies by their names for ``trial-ray sweep``."""
RECIPES: Mapping[str, tuple[str, Json]] = {
    "rloo": ("RLOO", {"advantage_estimator": "rloo"}),
    "dapo": (
        "DAPO",
        {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": None,
            "microbatch_weighting": "tokens",
            "drop_zero_variance_groups": True,
            # Replacing dropped groups of rollouts would give DAPO more rollouts than the other methods.
            "max_refills": 0,
            "mask_truncated": True,
            "ref_kl_coeff": 0.0,
        },
    ),
    "gspo": (
        "GSPO",
        {
            "ratio_level": "sequence",
            "surrogate_mean": "rows",
            "ref_kl_coeff": 0.0,
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "dual_clip": None,
        },
    ),
    "cispo": (
        "CISPO",
        {
            "policy_loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "microbatch_weighting": "tokens",
            "ref_kl_coeff": 0.0,
        },
    ),
}
"""Methods that are GRPO with other settings (see docs/methods.md), by name: title and settings."""
REFERENCE, SUBJECT = "grpo", "trial"


@dataclass(frozen=True)
class FinalEvaluation:
    """RLlib callback ``on_train_result``: evaluates a trial after its last iteration, and saves the results in its run folder.

    Attributes:
        splits: splits to evaluate on.
        iterations: the last iteration.
        labels: labels saved with the results, such as the method and the seed.
    """

    splits: tuple[EvaluationSplit, ...]
    iterations: int
    labels: Record

    def __call__(self, *, algorithm: GRPO, **_: Any) -> None:
        """Evaluate the trial after its last iteration."""
        folder = trial_folder(algorithm)
        if algorithm.iteration < self.iterations or folder is None:
            return
        config = algorithm.config
        (entry,) = config.environment_entries()
        for split in self.splits:
            evaluated = entry.with_config(**config.evaluation_env_config, split=split.split)
            result = algorithm.evaluate_set(choose_evaluation_set(evaluated, split.tasks), evaluated)
            result.policy, result.labels = f"{folder.name}, iteration {self.iterations}", dict(self.labels)
            result.save(evaluation_file(folder, split, self.iterations))


def evaluation_file(folder: Path, split: EvaluationSplit, iterations: int) -> Path:
    """Return the path of the results of a run's evaluation on a split after ``iterations`` iterations."""
    return RunFolder(folder).evaluations / set_file(str(split), iterations)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study; it trains a model (``backbone``) and is evaluated on the environment's ``splits`` at the end."""

    environment: str
    backbone: str
    method: str
    seed: int
    config: GRPOConfig
    splits: tuple[EvaluationSplit, ...]

    @property
    def name(self) -> str:
        """Name of the run's folder, without characters that Tune replaces in the names of folders."""
        name = f"{self.environment}-{self.backbone}-{self.method}-seed{self.seed}".lower()
        return re.sub(r'[/()<>:"\\|?*]', "_", name)

    @property
    def parameters(self) -> Json:
        """Values that identify the run in the sweep's tables: environment, model, method and seed."""
        return {name: getattr(self, name) for name in ("environment", "backbone", "method", "seed")}


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study for the models, environments and length of a scale.

    Attributes:
        name: name of the study.
        runs: planned runs by name, with the models in the scale's order.
        sweep: plan of a sweep with one trial per run.
    """

    name: str
    runs: Mapping[str, PlannedRun]
    sweep: SweepPlan

    @property
    def title(self) -> str:
        """Text with the study's name and title, its number of runs and the number of iterations of a run."""
        iterations = self.sweep.stop["training_iteration"]
        return f"{self.name}: {STUDIES[self.name].title} ({len(self.runs)} runs of {iterations:g} iterations)"


def plan_study(
    name: str, scale: str, seeds: int | None = None, iterations: int | None = None, overrides: Sequence[str] = ()
) -> StudyPlan:
    """Plan the runs of a study for the models, environments and length of a scale.

    Args:
        name: name of the study.
        scale: a name of :data:`SCALES`, or the path of a scale file.
        seeds: number of seeds, or ``None`` for the scale's.
        iterations: number of training iterations of every run, or ``None`` for the scale's.
        overrides: ``key=value`` settings, applied to TRIAL's config; other methods inherit the settings that they share.

    Raises:
        UserInputError: the scale's file is missing, fails, or defines no ``scale``.
        ConfigError: a config is wrong, a method's schedule is longer than the run, or two runs have the same name.
    """
    loaded = load_scale(scale)
    steps = iterations or loaded.iterations
    planned = list(_planned_runs(STUDIES[name], loaded, seeds, steps, overrides))
    runs = {run.name: run for run in planned}
    if len(runs) < len(planned):
        raise ConfigError(
            f"Two runs would have the same folder; {scale_file(scale)} needs names that differ: {', '.join(loaded.backbones)}."
        )
    named_configs = [(run_name, recorded_config(run.config).to_dict()) for run_name, run in runs.items()]
    records = {run_name: to_record(run.config) for run_name, run in runs.items()}
    described = {run_name: {"method": record["method"], **record["settings"]} for run_name, record in records.items()}
    stop: Numbers = {"training_iteration": steps}
    sweep = SweepPlan(
        path=scale_file(scale),
        configs=tuple(run.config for run in planned),
        param_space={NAMED_CONFIG: {"grid_search": named_configs}},
        num_trials=len(runs),
        parameters=lambda result: runs[Path(result.path).name].parameters,
        description={"stop": stop, **described},
        stop=stop,
        metric=TRAINING_SUCCESS,
        mode="max",
        repeats=min(Counter((run.environment, run.backbone, run.method) for run in planned).values()),
        config=planned[0].config,
        spaces={},
        trial_name=_trial_name,
        iterations=iterations,
        overrides=tuple(overrides),
    )
    return StudyPlan(name, runs, sweep)


def _trial_name(trial: Any) -> str:
    return str(trial.config[NAMED_CONFIG][0])


def _planned_runs(
    study: Study, scale: Scale, seeds: int | None, iterations: int, overrides: Sequence[str]
) -> Iterator[PlannedRun]:
    backbones = (scale.controlled_backbone,) if study.controlled else scale.backbones
    for environment, splits in scale.environments.items():
        for backbone in backbones:
            base = apply_overrides(scale.configure(environment, backbone), overrides)
            counts = {name: seeds or scale.method_seeds.get(name, scale.seeds) for name in study.methods}
            # Order the runs by seed, so that all methods have been trained with nearly the same seeds if the study is interrupted.
            for seed, method in itertools.product(range(max(counts.values())), counts):
                if seed >= counts[method]:
                    continue
                name, settings = ("grpo", RECIPES[method][1]) if method in RECIPES else (method, {})
                config: GRPOConfig = with_method(base, name)
                config.training(**settings, **scale.method_settings.get(method, {}))
                labels = {"method": method, "backbone": backbone, "seed": seed, "iteration": iterations}
                callbacks = force_list(config.callbacks_on_train_result)
                evaluation = FinalEvaluation(splits, iterations, labels)
                config.debugging(seed=seed).callbacks(on_train_result=[*callbacks, evaluation])
                config.validate()
                config.require_schedules_within(iterations)
                yield PlannedRun(environment, backbone, method, seed, config, splits)


# -- tables and figures ------------------------------------------------------------------------------------------------


def write_study(plan: StudyPlan, result: SweepResult, folder: Path) -> Iterator[str]:
    """Write the results of the trials and the study's tables and figures.

    For each environment and model, the figures are learning curves and, if their data are available, Figures 2 and 3 of the TRIAL
    paper.

    Args:
        plan: the study.
        result: results of the sweep.
        folder: folder of the sweep.

    Yields:
        A message for each written file, or for each part that could not be written.
    """
    result.save(folder)
    yield from messages_of({"tables": _write_tables(plan, folder), "figures": _write_figures(plan, folder)})


def _write_tables(plan: StudyPlan, folder: Path) -> Iterator[str]:
    iterations = int(plan.sweep.stop["training_iteration"])
    backbones = list(dict.fromkeys(run.backbone for run in plan.runs.values()))
    entries = [
        TableEntry(run.backbone, run.method, run.seed, EvaluationResult.load(file))
        for name, run in sorted(plan.runs.items(), key=lambda item: backbones.index(item[1].backbone))
        for split in run.splits
        if (file := evaluation_file(folder / name, split, iterations)).is_file()
    ]
    if not entries:
        raise UserInputError(f"None of the {len(plan.runs)} runs in {folder} has been evaluated, so there is no table.")
    reference = REFERENCE if any(entry.method == REFERENCE for entry in entries) else None
    for path in ResultTable(entries, reference, SUBJECT).write(folder / plan.name, _title):
        yield f"written: {path}"


def _title(method: str) -> str:
    return RECIPES[method][0] if method in RECIPES else method_title(method)


def _write_figures(plan: StudyPlan, folder: Path) -> Iterator[str]:
    from trial_ray.reports.page import load_groups

    places: dict[tuple[str, str], list[Path]] = {}
    for name, run in plan.runs.items():
        if (folder / name / RUN_FILE).is_file():
            places.setdefault((run.environment, run.backbone), []).append(folder / name)
    for place, runs in places.items():
        for path in write_figures(load_groups(runs), folder / "figures" / "-".join(place).lower()):
            if path.suffix != ".svg":
                yield f"written: {path}"
