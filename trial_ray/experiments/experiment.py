"""An experiment file: Python that defines ``config`` and ``stop``, in the style of RLlib's tuned examples."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError, UserInputError
from trial_ray.user_files import running_user_file

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Experiment:
    """What an experiment file defines.

    Attributes:
        path: the file.
        config: the algorithm's configuration, not built yet.
        stop: training ends as soon as one of these metrics reaches its value; keys are ``/``-joined result keys.
        names: everything else that the file defines (a sweep's ``metric`` and ``mode``, for example).
    """

    path: Path
    config: AlgorithmConfig
    stop: dict[str, float]
    names: dict[str, Any] = field(default_factory=dict)


def load_experiment(path: Path | str) -> Experiment:
    """Run an experiment file and check what it defines.

    Raises:
        UserInputError: the file is missing, fails, or defines no ``config``.
        ConfigError: ``stop`` is not a dict of numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise UserInputError(
            f"{path} is neither a file nor a tuned example. Name a Python file that defines `config` and `stop`."
        )
    names = _run(path)
    config, stop = names.get("config"), names.get("stop", {})
    if not hasattr(config, "build_algo"):
        raise UserInputError(
            f"{path} must define `config`, an AlgorithmConfig such as TRIALConfig(); found {type(config).__name__}."
        )
    if not isinstance(stop, dict) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in stop.values()
    ):
        raise ConfigError(f'{path} must define `stop` as a dict of numbers, such as {{"training_iteration": 20}}.')
    return Experiment(path, config, stop, names)


def reached(stop: dict[str, float], metrics: dict[str, float]) -> bool:
    """Whether one of the stop criteria is met; a metric that is not reported yet meets none."""
    return any(name in metrics and metrics[name] >= value for name, value in stop.items())


def _run(path: Path) -> dict[str, Any]:
    # As when Python runs a script: modules beside the file can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with running_user_file(path):
            return runpy.run_path(str(path), run_name="trial_ray_experiment")
    finally:
        sys.path.remove(str(path.resolve().parent))
