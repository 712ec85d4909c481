"""Scales, studies, and the runs that a table or figure needs: with which models, games and how many iterations each is trained."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import with_method
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import finite
from trial_ray.reports.records import OF_THE_RECORDING
from trial_ray.runs.checkpoints import list_checkpoints
from trial_ray.runs.config_record import load_commands, to_record
from trial_ray.runs.experiment import examples_folder
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.metric_files import set_file
from trial_ray.runs.overrides import apply_overrides
from trial_ray.user_files import run_user_file

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.algorithms.methods.trial import TRIALConfig
    from trial_ray.environments.registry import EnvironmentEntry


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """An evaluation set that the trained policy plays at the end.

    Attributes:
        split: the environment's split.
        panel: a name that ``trial_ray.evaluation.panels.choose_panel`` knows, or a number of tasks.
    """

    split: str
    panel: str | int = "full"


@dataclass(frozen=True, slots=True)
class Choice:
    """How one setting of several methods is chosen before a study, on games that the study does not use.

    Every method gets the same values to choose from, the same seeds and the same evaluation set, so that none is favoured.

    Attributes:
        setting: its name, such as ``hindsight_coeff``.
        values: to choose from.
        methods: that have it.
        seeds: of the runs that are made to choose; the study's seeds begin at 0.
        training_games: keyword arguments of the environment in which these runs' training games differ from the study's.
        panel_games: those in which their evaluation set does.
    """

    setting: str
    values: tuple[float, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    training_games: Mapping[str, Any]
    panel_games: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """The ``scale`` of a scale file.

    Attributes:
        configure: from environment and backbone to TRIAL's config of a run; other methods keep what it changes of the
            defaults.
        environments: by name, the sets that are evaluated at the end.
        backbones: names, in the order of the rows.
        controlled_backbone: the one that the controlled study and the figures use.
        iterations: of every run.
        seeds: how many, unless ``--seeds`` says otherwise.
        method_settings: by method, settings of its own at this scale, such as a schedule that fits into fewer iterations.
        method_seeds: by method, how many seeds it gets in place of ``seeds``.
        choice: of a setting, before the study; ``None`` takes what ``configure`` says.
    """

    configure: Callable[[str, str], TRIALConfig]
    environments: Mapping[str, tuple[EvaluationSet, ...]]
    backbones: tuple[str, ...]
    controlled_backbone: str
    iterations: int
    seeds: int
    method_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    method_seeds: Mapping[str, int] = field(default_factory=dict)
    choice: Choice | None = None


def scale_names() -> list[str]:
    """Scales that come with this package, the smallest first."""
    return ["tiny", "study", "shape", "guessing", "webshop", "pretrained", "small", "paper"]


def scale_file(name: str) -> Path:
    """The file of a scale: one of :func:`scale_names`, or a path that ends in ``.py``.

    Raises:
        UserInputError: there is no such file.
    """
    path = Path(name).expanduser() if name.endswith(".py") else examples_folder() / "reproduce" / f"{name}.py"
    if not path.is_file():
        raise UserInputError(
            f"There is no scale {name!r} ({path} is not a file). Choose one of {', '.join(scale_names())}, or name a Python "
            "file that defines `scale`."
        )
    return path


def load_scale(name: str) -> Scale:
    """Run a scale's file.

    Raises:
        UserInputError: the file is missing, fails, or defines no ``scale``.
    """
    path = scale_file(name)
    scale = run_user_file(path, "trial_ray_scale").get("scale")
    if not isinstance(scale, Scale):
        raise UserInputError(
            f"{path} must define `scale`, a trial_ray.reproduction.Scale; found {type(scale).__name__}."
        )
    return scale


Chosen = Mapping[tuple[str, str, str], float]
"""By environment, backbone and method: the value that was chosen for the scale's setting."""


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
    "study": Study(
        "turn profiles and methods where the hindsight view knows better",
        ("grpo", "uniform", "permuted", "trial", "value_weighted", "serl", "sdar", "rlsd", "grpo_opsd", "gigpo"),
    ),
    "shape": Study(
        "turn profiles from several warm starts", ("grpo", "uniform", "permuted", "trial"), controlled=False
    ),
    "pair": Study("TRIAL against GRPO", ("grpo", "trial")),
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
        value: of the setting that is to be chosen; ``None`` in a study's own runs.
    """

    environment: str
    backbone: str
    method: str
    seed: int
    config: GRPOConfig
    iterations: int
    sets: tuple[EvaluationSet, ...]
    folder: Path
    value: float | None = None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    def evaluation(self, evaluated: EvaluationSet) -> Path:
        """Where the final evaluation of a set is written."""
        return RunFolder(self.folder).evaluations / set_file(set_name(evaluated), self.iterations)

    def entry(self, evaluated: EvaluationSet) -> EnvironmentEntry:
        """The run's environment with the keyword arguments of an evaluation set."""
        (entry,) = self.config.environment_entries()
        return entry.at(**self.config.evaluation_env_config, split=evaluated.split)

    @property
    def trained(self) -> int:
        """The iteration of the newest checkpoint; 0 without one."""
        saved = list_checkpoints(RunFolder(self.folder).checkpoints)
        return int(saved[-1].name) if saved else 0

    def state(self) -> str:
        """``done``, ``unfinished``, or ``new``.

        Raises:
            UserInputError: the folder holds a run of another config, or one that was trained for longer.
        """
        if not self.folder.exists():
            return "new"
        folder = RunFolder.reopen(self.folder)
        self._require_same_config(folder)
        if self.trained > self.iterations:
            raise UserInputError(
                f"{self.folder} was trained for {self.trained} iterations; this study wants {self.iterations}. "
                "Name another folder with --out."
            )
        complete = all(self.evaluation(evaluated).is_file() for evaluated in self.sets)
        return "done" if complete and folder.state() == "done" else "unfinished"

    def _require_same_config(self, folder: RunFolder) -> None:
        record = finite(to_record(self.config))
        ours = {**record["settings"], "method": record["method"]}
        for command in load_commands(folder.path / "resolved_config.json"):
            theirs = {**command["settings"], "method": command["method"]}
            if ours.get("chat_template_date") is None:  # then it is the day on which the run began
                theirs["chat_template_date"] = None
            for key in sorted((theirs.keys() | ours.keys()) - OF_THE_RECORDING):
                if theirs.get(key) != ours.get(key):
                    since = f" from iteration {after + 1} on" if (after := command.get("after_iteration")) else ""
                    raise UserInputError(
                        f"{folder.path} holds a run of another config: {key} is {theirs.get(key)!r} there{since} and "
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
    chosen: Chosen | None = None,
) -> list[PlannedRun]:
    """Every run that ``study`` needs at ``scale``, by environment, backbone, method and seed.

    Args:
        study: what is compared.
        scale: with what.
        folder: runs lie below it in ``runs/``.
        seeds: how many; default the scale's.
        iterations: default the scale's.
        overrides: ``key=value`` for every run, applied to TRIAL's config; other methods take over what they share.
        chosen: what :func:`choose` found, where the scale has a choice.

    Raises:
        ConfigError: a config is wrong, or a method's schedule is longer than the run.
        UserInputError: the scale lacks an environment of the study.
    """
    steps = iterations or scale.iterations
    runs = []
    for place in _bases(study, scale, overrides):
        environment, backbone, _ = place
        for method in study.methods:
            settings = {}
            if chosen and scale.choice and (environment, backbone, method) in chosen:
                settings[scale.choice.setting] = chosen[environment, backbone, method]
            for seed in range(seeds or scale.method_seeds.get(method, scale.seeds)):
                path = folder / "runs" / f"{environment}-{backbone}-{method}-seed{seed}".lower()
                runs.append(_planned(scale, place, method, settings, seed, path, steps))
    return runs


def plan_choice(
    study: Study, scale: Scale, folder: Path, *, iterations: int | None = None, overrides: list[str] | None = None
) -> list[PlannedRun]:
    """The runs out of which the scale's setting is chosen, for the study's methods that have it; arguments as :func:`plan_runs`.

    Raises:
        ConfigError, UserInputError: as :func:`plan_runs`.
    """
    choice, steps, runs = scale.choice, iterations or scale.iterations, []
    if choice is None:
        return []
    for environment, backbone, base in _bases(study, scale, overrides):
        base = base.environment(env_config={**base.env_config, **choice.training_games})
        base = base.evaluation(evaluation_env_config={**base.evaluation_env_config, **choice.panel_games})
        place = environment, backbone, base
        for method in (method for method in choice.methods if method in study.methods):
            for value in choice.values:
                for seed in choice.seeds:
                    name = f"choice-{environment}-{backbone}-{method}-{choice.setting}{value:g}-seed{seed}".lower()
                    settings, path = {choice.setting: value}, folder / "runs" / name
                    runs.append(_planned(scale, place, method, settings, seed, path, steps, value))
    return runs


def choose(runs: Sequence[PlannedRun]) -> tuple[Chosen, list[dict[str, Any]]]:
    """The value with the highest mean success on the evaluation set of these runs, for each method; of equals the smaller one.

    Returns:
        The values, and the mean success of every value that was tried.

    Raises:
        UserInputError: some of the runs are not done.
    """
    unfinished = [run.name for run in runs if run.state() != "done"]
    if unfinished:
        raise UserInputError(
            f"Nothing can be chosen yet: {len(unfinished)} of {len(runs)} runs are not done ({unfinished[0]}, …). The same command "
            "continues them."
        )
    # Fractions: equal sums of successes would differ in the last bits of floats.
    rates: dict[tuple[str, str, str], dict[float, list[Fraction]]] = {}
    for run in runs:
        assert run.value is not None
        played = [EvaluationResult.load(run.evaluation(evaluated)).overall for evaluated in run.sets]
        success = statistics.mean(Fraction(rate.successes, max(1, rate.episodes)) for rate in played)
        by_value = rates.setdefault((run.environment, run.backbone, run.method), {})
        by_value.setdefault(run.value, []).append(success)
    means = {key: {value: statistics.mean(found) for value, found in of.items()} for key, of in rates.items()}
    chosen = {key: max(sorted(of), key=lambda value: of[value]) for key, of in means.items()}
    tried = [
        {
            "environment": key[0],
            "backbone": key[1],
            "method": key[2],
            "value": value,
            "success": float(mean),
            "runs": len(rates[key][value]),
            "chosen": chosen[key] == value,
        }
        for key, of in means.items()
        for value, mean in of.items()
    ]
    return chosen, tried


def _bases(study: Study, scale: Scale, overrides: list[str] | None) -> Iterator[tuple[str, str, Any]]:
    """Environment, backbone, and TRIAL's config for them."""
    backbones = (scale.controlled_backbone,) if study.controlled else scale.backbones
    for environment in study.environments or tuple(scale.environments):
        if environment not in scale.environments:
            raise UserInputError(
                f"The scale has no environment {environment!r}; found {', '.join(scale.environments)}."
            )
        for backbone in backbones:
            yield environment, backbone, apply_overrides(scale.configure(environment, backbone), overrides or [])


def _planned(
    scale: Scale,
    place: tuple[str, str, GRPOConfig],
    method: str,
    settings: Mapping[str, Any],
    seed: int,
    path: Path,
    steps: int,
    value: float | None = None,
) -> PlannedRun:
    environment, backbone, base = place
    settings = {**scale.method_settings.get(method, {}), **settings}
    config: GRPOConfig = with_method(base, method).training(**settings).debugging(seed=seed)
    RunFolder(path).configure(config)
    config.validate()
    config.require_schedules_within(steps)
    return PlannedRun(environment, backbone, method, seed, config, steps, scale.environments[environment], path, value)
