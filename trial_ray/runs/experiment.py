"""Experiment files: Python that defines ``config`` and ``stop``, in the style of RLlib's tuned examples.

The package's own experiment files are at the top of a clone and inside the installed package.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError, UserInputError
from trial_ray.files import examples_folder
from trial_ray.user_files import run_user_file

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig


@dataclass(frozen=True, slots=True)
class Experiment:
    """Contents of an experiment file.

    Attributes:
        path: the file.
        config: the algorithm's configuration, not built yet.
        stop: values by metric (``/``-joined result key); training ends as soon as one metric reaches its value.
        names: all other names that the file defines (for example a sweep's ``metric`` and ``mode``).
    """

    path: Path
    config: GRPOConfig
    stop: dict[str, float]
    names: dict[str, Any] = field(default_factory=dict)


def experiment_file(name: str) -> Path:
    """Return the file for ``name``: a path, or the name of a tuned example (``alfworld_quickstart``).

    An existing file at that path takes precedence. If neither exists, the path is returned unchanged, and loading it raises.
    """
    path, example = Path(name), examples_folder() / f"{name}.py"
    # Use os.path.isfile: Path.is_file raises an error if the name is too long.
    return example if not os.path.isfile(path) and not path.is_absolute() and os.path.isfile(example) else path


def _nearest_experiment(path: Path) -> str | None:
    """Return the file next to ``path``, else the tuned example, with the most similar name, as the command line accepts it."""
    examples = examples_folder()
    files = [*examples.glob("*.py"), *examples.glob("sweeps/*.py")]
    known = {file.stem: file.relative_to(examples).with_suffix("").as_posix() for file in files}
    known |= {file.stem: str(file) for file in path.parent.glob("*.py") if file.is_file()}
    nearest = difflib.get_close_matches(path.name.removesuffix(".py"), known, n=1)
    return known[nearest[0]] if nearest else None


def load_experiment(path: Path | str) -> Experiment:
    """Run an experiment file and check the ``config`` and ``stop`` that it defines.

    Raises:
        UserInputError: the file is missing, fails, or defines no ``config``.
        ConfigError: ``stop`` is not a dict of finite numbers.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        nearest = _nearest_experiment(path)
        advice = f"Did you mean {nearest}?" if nearest else "Name a Python file that defines `config` and `stop`."
        raise UserInputError(f"{path} is neither a file nor a tuned example. {advice}")
    names = run_user_file(path, "trial_ray_experiment")
    config: Any = names.get("config")
    stop = names.get("stop", {})
    if not hasattr(config, "environment_entries"):
        raise UserInputError(
            f"{path} must define `config`, a GRPOConfig or a config derived from it, got {type(config).__name__}."
        )
    if not isinstance(stop, dict) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
        for value in stop.values()
    ):
        raise ConfigError(
            f'{path} must define `stop` as a dict of finite numbers, such as {{"training_iteration": 20}}.'
        )
    return Experiment(path, config, stop, names)


def reached(stop: dict[str, float], metrics: dict[str, float]) -> bool:
    """Return True if a stop criterion is met; a metric that is not reported yet meets none."""
    return any(name in metrics and metrics[name] >= value for name, value in stop.items())
