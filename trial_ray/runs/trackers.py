"""Services that runs are logged to: Weights & Biases, MLflow, Trackio, SwanLab, and Ray for Prometheus.

What is sent: every iteration's numbers, and the resolved settings without anything that looks like a secret. Code, console
output, command line and environment variables are not sent.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trial_envs.core.extras import install_command
from trial_ray.errors import ConfigError, MissingDependencyError, UserInputError, first_line
from trial_ray.files import without_secrets
from trial_ray.runs.ray_metrics import RayTracker

PROJECT = "trial-ray"
"""Project, or experiment, of the services, unless their own environment variables name another."""
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Description of a run for tracking services.

    Attributes:
        name: what people call it.
        key: identifies it, so that a run that continues goes on where it was.
        settings: as in ``resolved_config.json``; secrets are removed before anything is sent.
        folder: for what a library keeps on this machine.
        group: runs that belong together, such as the trials of a sweep.
        resumed: whether it was begun before.
    """

    name: str
    key: str
    settings: Mapping[str, Any]
    folder: Path
    group: str | None = None
    resumed: bool = False


class WandbTracker:
    """Weights & Biases; ``WANDB_PROJECT``, ``WANDB_MODE=offline`` and its further environment variables hold."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            group=run.group,
            id=run.key,
            resume="allow",
            reinit="create_new",
            config=without_secrets(run.settings),
            dir=run.folder,
            settings=wandb.Settings(
                console="off",
                quiet=True,
                silent=True,
                save_code=False,
                disable_git=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send an iteration's metrics."""
        self._run.log(dict(metrics), step=iteration)

    def close(self, state: str) -> None:
        """Finish; anything but ``done`` shows as a failure there."""
        self._run.finish(exit_code=0 if state == DONE else 1)


class MlflowTracker:
    """MLflow; ``MLFLOW_TRACKING_URI`` (without it, ``mlflow.db`` in the working directory) and ``MLFLOW_EXPERIMENT_NAME`` hold.

    Through its client, because its fluent functions know one run at a time.
    """

    KEY = "trial_ray.run"
    STATES = {DONE: "FINISHED", FAILED: "FAILED", INTERRUPTED: "KILLED"}  # noqa: RUF012  read only
    LONGEST_VALUE = 6000
    MOST_AT_ONCE = 100

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient
        from ray.tune.utils import flatten_dict

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        wanted = f"tags.`{self.KEY}` = '{run.key}'"
        runs = self._client.search_runs([experiment], filter_string=wanted) if run.resumed else []
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {self.KEY: run.key, **({"group": run.group} if run.group else {})}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        settings = flatten_dict(without_secrets(run.settings), delimiter=".")
        params = [Param(name, str(value)[: self.LONGEST_VALUE]) for name, value in settings.items()]
        for begin in range(0, len(params), self.MOST_AT_ONCE):
            self._client.log_batch(self._id, params=params[begin : begin + self.MOST_AT_ONCE])

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send an iteration's metrics."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(name, value, now, iteration) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self, state: str) -> None:
        """Finish."""
        self._client.set_terminated(self._id, status=self.STATES[state])


class TrackioTracker:
    """Trackio, which keeps runs on this machine; ``TRACKIO_PROJECT``, ``TRACKIO_DIR`` and its further environment variables hold.

    Its runs are continued by their names, so a run has its key for one.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # In a context of its own: it finishes what it takes for the process's previous run.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = contextvars.Context().run(
                trackio.init,
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=run.key,
                group=run.group,
                resume="allow",
                config={"name": run.name, **without_secrets(run.settings)},
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send an iteration's metrics."""
        # Its own columns have the names of some of RLlib's metrics.
        self._run.log(
            {name: value for name, value in metrics.items() if name not in ("timestamp", "step")}, step=iteration
        )

    def close(self, state: str) -> None:
        """Finish; it knows no states."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class SwanlabTracker:
    """SwanLab; ``SWANLAB_MODE=offline``, ``SWANLAB_PROJECT`` and its further environment variables hold.

    It has one run at a time in a process, so that trials of a sweep that run side by side cannot be logged to it.
    """

    STATES = {DONE: "success", FAILED: "crashed", INTERRUPTED: "aborted"}  # noqa: RUF012  read only

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        if swanlab.has_run():
            raise UserInputError(
                "SwanLab logs one run of a process at a time, and another run is open; run trials one after the other."
            )
        watched = ("hardware", "runtime", "requirements", "git", "swanlab", "monitor")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.name,
            group=run.group,
            id=run.key,
            resume="allow",
            log_dir=str(run.folder / "swanlog"),
            config=without_secrets(run.settings),
            settings=swanlab.Settings(
                interactive=False, terminal={"proxy_type": "none"}, probe=dict.fromkeys(watched, False)
            ),
        )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send an iteration's metrics."""
        self._run.log(dict(metrics), step=iteration)

    def close(self, state: str) -> None:
        """Finish."""
        self._run.finish(self.STATES[state], error="The run failed." if state == FAILED else None)


TRACKERS: dict[str, Callable[[TrackedRun], Any]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
    "ray": lambda run: RayTracker(run.name, run.group),
}
"""By what ``--log-to`` and the extra are called: each sends metrics with ``log`` and finishes with ``close``."""


def require_trackers(names: Sequence[str]) -> None:
    """Reject services whose library is not installed, before anything starts, and Ray's metrics without a cluster.

    Raises:
        ConfigError: Ray would run on this machine alone, where nothing exports its metrics.
        MissingDependencyError: names the extra.
    """
    if "ray" in names and "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            "--log-to ray: expected a Ray cluster in RAY_ADDRESS, found none. Start one (`ray start --head`) and set "
            "RAY_ADDRESS: the Ray that this command would start exports no metrics."
        )
    for name in names:
        if find_spec(name) is None:
            raise MissingDependencyError(f"--log-to {name} needs {name}: {install_command(name)}.")


class Trackers:
    """A run at several services; one that fails while the run goes on is left, and the run continues.

    Args:
        names: keys of :data:`TRACKERS`.
        run: what they are told.
        warn: told in one line of a service that failed.

    Raises:
        UserInputError: a service did not take the run: it asks for a login, or cannot be reached.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            try:
                self._open[name] = TRACKERS[name](run)
            except Exception as error:
                self.close(FAILED)
                raise UserInputError(
                    f"{name} rejected the run: {type(error).__name__}: {first_line(error)}. Log in with its own command, or use it "
                    "offline (docs/evaluation.md shows how)."
                ) from error

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close(FAILED if issubclass(kind, Exception) else INTERRUPTED)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Send an iteration's metrics to all of them."""
        self._each(lambda tracker: tracker.log(iteration, metrics))

    def close(self, state: str) -> None:
        """Finish at all of them: ``done``, ``failed`` or ``interrupted``."""
        self._each(lambda tracker: tracker.close(state))
        self._open.clear()

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:
                # A run of days does not end because a service does.
                del self._open[name]
                self._warn(
                    f"warning: {name} failed, so nothing more is logged to it: {type(error).__name__}: {first_line(error)}"
                )


def identifier(text: str) -> str:
    """``text`` as what identifies a run: services take letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[-64:]
