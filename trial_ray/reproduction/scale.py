"""A scale: with which models, games and how many iterations the paper's comparisons are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import UserInputError
from trial_ray.runs.experiment import examples_folder
from trial_ray.user_files import run_user_file

if TYPE_CHECKING:
    from trial_ray.algorithms.methods.trial import TRIALConfig


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
    return ["tiny", "study", "webshop", "small", "paper"]


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
