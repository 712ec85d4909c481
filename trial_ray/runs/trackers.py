"""Tracking services for runs: Weights & Biases, MLflow, Trackio, SwanLab, and Ray's metrics for Prometheus.

Each iteration's metrics and the settings of the run are sent, without values that look like secrets. Code, console output,
command line and environment variables are not sent.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trial_envs.core.extras import install_command
from trial_ray.errors import ConfigError, MissingDependencyError, UserInputError, first_line
from trial_ray.files import Numbers, Record
from trial_ray.metrics import EFFECTIVE_SAMPLE_SIZE, ENV_RUNNERS, EVALUATION_SUCCESS, LEARNER, TRAINING_SUCCESS
from trial_ray.secrets import without_secrets

GAUGES = {
    "trial_iteration": "training_iteration",
    "trial_iteration_seconds": "time_this_iter_s",
    "trial_sampling_seconds": "seconds/sampling",
    "trial_update_seconds": "seconds/update",
    "trial_sync_seconds": "seconds/sync",
    "trial_evaluation_seconds": "seconds/evaluation",
    "trial_success_rate": TRAINING_SUCCESS,
    "trial_evaluation_success_rate": EVALUATION_SUCCESS,
    "trial_staleness": f"{LEARNER}rows/staleness_mean",
    "trial_effective_sample_size": EFFECTIVE_SAMPLE_SIZE,
    "trial_logprob_diff": f"{LEARNER}engine/logprob_diff",
    "trial_kl": f"{LEARNER}grpo/kl",
    "trial_entropy": f"{LEARNER}grpo/entropy",
    "trial_health_checks_failed": "health_checks/num_failed",
}
"""Keys of metrics whose newest value Ray exports, by the name of the metric in Ray."""
COUNTERS = {
    "trial_turns": f"{ENV_RUNNERS}num_env_steps_sampled",
    "trial_episodes": f"{ENV_RUNNERS}num_episodes",
    "trial_failed_episodes": f"{ENV_RUNNERS}num_failed_episodes",
    "trial_prompt_tokens": f"{ENV_RUNNERS}num_prompt_tokens",
    "trial_response_tokens": f"{ENV_RUNNERS}num_response_tokens",
    "trial_trained_tokens": f"{LEARNER}update/tokens_trained",
    "trial_trained_groups": "groups/num_trained",
    "trial_dropped_groups": "groups/num_dropped",
    "trial_lost_groups": f"{LEARNER}rows/lost_groups",
}
"""Keys of metrics whose sum over the iterations Ray exports, by the name of the metric in Ray."""
TAGS = ("run", "group")


class RayTracker:
    """Tracks a run in Ray's own metrics, which Ray exports to Prometheus.

    Args:
        run: description of the run; its name and the name of its group of runs are tags of every metric.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._tags = {"run": run.name, "group": run.group or ""}
        self._metrics: dict[str, Any] = {}

    def log(self, iteration: int, metrics: Numbers) -> None:
        """Set the gauges and increment the counters; Ray exports them within some seconds."""
        from ray.util.metrics import Counter, Gauge

        # Create metrics on first use: trackers are built before ray.init().
        for name, key in {**GAUGES, **COUNTERS}.items():
            kind = Gauge if name in GAUGES else Counter
            if key in metrics and (kind is Gauge or metrics[key] > 0):
                if name not in self._metrics:
                    self._metrics[name] = kind(name, key, TAGS).set_default_tags(self._tags)
                (self._metrics[name].set if kind is Gauge else self._metrics[name].inc)(metrics[key])

    def close(self, state: str) -> None:
        """Do nothing: Ray's metrics do not record how a run ended."""


PROJECT = "trial-ray"
"""Default name of the services' project (MLflow: experiment); environment variables of a service override it."""
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for tracking services.

    Attributes:
        name: display name.
        key: identifier of the run; a resumed run continues the service's run with this key.
        settings: the run's settings, as in ``resolved_config.json``; :class:`Trackers` removes secrets.
        folder: folder for files that a service's library keeps on this machine.
        group: name of a group of runs, for example of a sweep's trials; ``None`` for a single run.
        resumed: whether an earlier command started the run.
    """

    name: str
    key: str
    settings: Record
    folder: Path
    group: str | None = None
    resumed: bool = False


class WandbTracker:
    """Tracks a run in W&B; ``WANDB_PROJECT``, ``WANDB_MODE=offline`` and W&B's other environment variables apply."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            group=run.group,
            id=run.key,
            resume="allow",
            reinit="create_new",
            config=dict(run.settings),
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

    def log(self, iteration: int, metrics: Numbers) -> None:
        """Send an iteration's metrics."""
        self._run.log(dict(metrics), step=iteration)

    def close(self, state: str) -> None:
        """End the run with the state ``state``; Weights & Biases shows every state except ``done`` as a failure."""
        self._run.finish(exit_code=0 if state == DONE else 1)


class MlflowTracker:
    """Tracks a run in MLflow.

    ``MLFLOW_TRACKING_URI`` (default: ``mlflow.db`` in the working directory) and ``MLFLOW_EXPERIMENT_NAME`` apply. The class
    uses ``MlflowClient``, because functions such as ``mlflow.log_metrics`` support only one run at a time.
    """

    KEY = "trial_ray.run"
    STATES = {DONE: "FINISHED", FAILED: "FAILED", INTERRUPTED: "KILLED"}  # noqa: RUF012  read only
    MAX_LENGTH = 6000
    MAX_BATCH = 100

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient
        from ray.tune.utils import flatten_dict

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        has_key = f"tags.`{self.KEY}` = '{run.key}'"
        runs = self._client.search_runs([experiment], filter_string=has_key) if run.resumed else []
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {self.KEY: run.key, **({"group": run.group} if run.group else {})}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        settings = flatten_dict(dict(run.settings), delimiter=".")
        params = [Param(name, str(value)[: self.MAX_LENGTH]) for name, value in settings.items()]
        for begin in range(0, len(params), self.MAX_BATCH):
            self._client.log_batch(self._id, params=params[begin : begin + self.MAX_BATCH])

    def log(self, iteration: int, metrics: Numbers) -> None:
        """Send an iteration's metrics."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(name, value, now, iteration) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self, state: str) -> None:
        """End the run with the state ``state``."""
        self._client.set_terminated(self._id, status=self.STATES[state])


class TrackioTracker:
    """Tracks a run in Trackio, which stores runs on this machine.

    ``TRACKIO_PROJECT``, ``TRACKIO_DIR`` and Trackio's other environment variables apply. Trackio resumes runs by name, so the
    run's key is used as the name.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # Call trackio.init in a new contextvars.Context: in the current one, trackio.init would end a run that is open there.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = contextvars.Context().run(
                trackio.init,
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=run.key,
                group=run.group,
                resume="allow",
                config={"name": run.name, **run.settings},
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, iteration: int, metrics: Numbers) -> None:
        """Send an iteration's metrics."""
        # Omit the metrics "timestamp" and "step": Trackio has columns of its own with these names.
        self._run.log(
            {name: value for name, value in metrics.items() if name not in ("timestamp", "step")}, step=iteration
        )

    def close(self, state: str) -> None:
        """End the run; Trackio does not store the state."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class SwanlabTracker:
    """Tracks a run in SwanLab; ``SWANLAB_MODE=offline``, ``SWANLAB_PROJECT`` and its other environment variables apply.

    SwanLab supports one run per process at a time, so it cannot track parallel trials of a sweep.
    """

    STATES = {DONE: "success", FAILED: "crashed", INTERRUPTED: "aborted"}  # noqa: RUF012  read only

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        if swanlab.has_run():
            raise UserInputError(
                "SwanLab logs one run of a process at a time, and another run is open; run trials one after the other."
            )
        probes = ("hardware", "runtime", "requirements", "git", "swanlab", "monitor")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.name,
            group=run.group,
            id=run.key,
            resume="allow",
            log_dir=str(run.folder / "swanlog"),
            config=run.settings,
            settings=swanlab.Settings(
                interactive=False, terminal={"proxy_type": "none"}, probe=dict.fromkeys(probes, False)
            ),
        )

    log = WandbTracker.log
    """Send an iteration's metrics."""

    def close(self, state: str) -> None:
        """End the run with the state ``state``."""
        self._run.finish(self.STATES[state], error="The run failed." if state == FAILED else None)


TRACKERS: dict[str, Callable[[TrackedRun], Any]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
    "ray": RayTracker,
}
"""Functions that create a tracker, by the service's name in ``--log-to``; trackers have the methods ``log`` and ``close``."""


def require_trackers(names: Sequence[str]) -> None:
    """Reject services whose library is missing, and Ray's metrics without ``RAY_ADDRESS``, before the run starts.

    Raises:
        ConfigError: Ray would run only on this machine, where nothing exports its metrics.
        MissingDependencyError: a library is missing; the message has the command that installs it.
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
    """Tracks a run in several services; a service that fails during the run is dropped, and the run continues.

    Args:
        names: keys of :data:`TRACKERS`.
        run: description of the run for the services.
        warn: prints a warning.

    Raises:
        UserInputError: a service could not start to track the run, for example because it requires a login.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._open: dict[str, Any] = {}
        run = replace(run, settings=without_secrets(run.settings))
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

    def log(self, iteration: int, metrics: Numbers) -> None:
        """Send an iteration's metrics to all services."""
        self._call(lambda tracker: tracker.log(iteration, metrics))

    def close(self, state: str) -> None:
        """End the run in all services, with the state ``done``, ``failed`` or ``interrupted``."""
        self._call(lambda tracker: tracker.close(state))
        self._open.clear()

    def _call(self, call: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:
                # The failure of a service must not end the run.
                del self._open[name]
                self._warn(
                    f"warning: {name} failed, so nothing more is logged to it: {type(error).__name__}: {first_line(error)}"
                )


def identifier(text: str) -> str:
    """Return an identifier for services: the last 64 characters of ``text``, with dashes for characters they reject."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[-64:]
