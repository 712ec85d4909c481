"""Runs of this package on a Ray cluster, and the logs of their actors, as its dashboard reports them."""

from __future__ import annotations

import glob
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trial_ray.errors import InfrastructureError, TrialRayError, UserInputError, first_line
from trial_ray.files import make_folder
from trial_ray.runs.dashboard import ALIVE, DEAD, Dashboard
from trial_ray.runs.status import ACTIVE, FOLDER, RunStatus, StatusFile

LOGS = Path("logs", "actors")
"""In the folder of a run."""
MOST_RUNS = 50
"""Runs of a node that are listed, the newest ones."""
ALL_LINES = -1
MOST_LINES = 50_000
"""Lines of a log file that are fetched, the newest ones."""
COLLECT_S = 60.0
"""How long a node may take for the logs of a run."""
NODES_AT_ONCE = 16
NO_JOB = "ffffffff"


@dataclass(frozen=True, slots=True)
class ActorState:
    """An actor of a run.

    Attributes:
        name: such as ``engine 0``; the name of its class where the run has not named it.
        state: Ray's, such as ``ALIVE``, ``PENDING_CREATION`` or ``DEAD``.
        node: address of its node; empty where it has none.
        pid: of its process there; 0 where it has none.
        reason: why it is dead; empty where Ray does not say.
    """

    name: str
    state: str
    node: str
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A run or sweep on a cluster.

    Attributes:
        job: Ray's id of the driver's job.
        submission: id of the submitted job; empty where the driver was started in another way.
        driver: address of the driver's node.
        pid: of the driver there.
        status: as the driver reported it; the state is ``ended`` where the driver is gone without another one.
        actors: of a run that goes on, without those that it has replaced.
    """

    job: str
    submission: str
    driver: str
    pid: str
    status: RunStatus
    actors: tuple[ActorState, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return Path(self.status.run).name

    def warnings(self) -> list[str]:
        """What a person should look at, a line each."""
        lines = [
            f"{actor.name} is {actor.state.lower().replace('_', ' ')}{actor.reason and f': {actor.reason}'}"
            for actor in self.actors
            if actor.state != ALIVE
        ]
        restarts = f"restarts from a checkpoint: {self.status.restarts}" if self.status.restarts else ""
        return lines + [text for text in (restarts, self.status.faults, self.status.error) if text]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of plain types."""
        known = asdict(self)
        status = known.pop("status")
        left = self.status.seconds_left
        return {"name": self.name, **status, **known, "seconds_left": left, "warnings": self.warnings()}


def list_runs(dashboard: Dashboard, tell: Callable[[str], None]) -> list[ClusterRun]:
    """Runs whose drivers' nodes are there, in the order in which their drivers started.

    Args:
        dashboard: of the cluster.
        tell: takes a line about what could not be read.

    Raises:
        ClusterError: no dashboard answers.
        InfrastructureError: the state of the cluster cannot be read.
    """
    jobs = {row["job_id"]: row for row in dashboard.rows("jobs") if row["job_id"]}
    nodes = {row["node_id"]: row["node_ip"] for row in dashboard.rows("nodes", state=ALIVE)}
    with ThreadPoolExecutor(NODES_AT_ONCE) as pool:
        read = [each for found in pool.map(partial(_read_statuses, dashboard, tell), nodes.items()) for each in found]
    # A run that goes on in another process of its job has left an older status; nodes of a machine may share their logs.
    newest = {(job, status.run): status for job, status in sorted(read, key=lambda each: each[1].updated)}
    runs_of = Counter(job for job, _ in newest)
    runs = []
    for (job, _), status in sorted(newest.items(), key=lambda item: _started(item[0][0])):
        row = jobs.get(job, {})
        driver = row.get("driver_info") or {}
        actors: tuple[ActorState, ...] = ()
        if status.state in ACTIVE and row.get("status") in ("PENDING", "RUNNING"):
            actors = _actors(dashboard, job, status.actors, nodes, alone=runs_of[job] == 1)
        elif status.state in ACTIVE:
            status = replace(status, state="ended")
        address, pid = driver.get("node_ip_address", ""), driver.get("pid", "")
        runs.append(ClusterRun(job, row.get("submission_id") or "", address, pid, status, actors))
    return runs


def _read_statuses(
    dashboard: Dashboard, tell: Callable[[str], None], node: tuple[str, str]
) -> list[tuple[str, RunStatus]]:
    """Those on a node (its id and address), with the job of each."""
    found = []
    try:
        for file in sorted(dashboard.log_files(node[0], f"{FOLDER}/*.json"), key=_started)[-MOST_RUNS:]:
            text = dashboard.log(node[0], file, ALL_LINES)
            try:
                found.append((_job(file), RunStatus.parse(text)))
            except ValueError as error:
                tell(f"{file} on node {node[1]} was written by another version of trial-ray: {error}")
    except InfrastructureError as error:
        tell(f"node {node[1]} is left out: {error}")
    return found


def _job(file: str) -> str:
    return Path(file).stem.partition("-")[0]


def _started(file: str) -> str:
    """What sorts jobs, and files that begin with them, by age: Ray counts jobs in little-endian bytes."""
    return "".join(reversed(re.findall("..", _job(file))))


def _actors(
    dashboard: Dashboard, job: str, names: Mapping[str, str], nodes: Mapping[str, str], alone: bool
) -> tuple[ActorState, ...]:
    """Those that the run has named; of a job with no other run also those that start, by their classes."""
    states = [
        ActorState(
            name=names.get(row["actor_id"], row["class_name"]),
            state=row["state"],
            node=nodes.get(row["node_id"] or "", ""),
            pid=row["pid"] or 0,
            reason=_death(row["death_cause"]),
        )
        for row in dashboard.rows("actors", job_id=job)
        if row["actor_id"] in names or (alone and row["state"] != DEAD)
    ]
    return tuple(sorted(states, key=lambda actor: actor.name))


def _death(cause: Mapping[str, Any] | None) -> str:
    """First line of what Ray says of a dead actor."""
    said = [each.get("error_message") for each in (cause or {}).values() if isinstance(each, Mapping)]
    return next((str(text).strip().splitlines()[0] for text in said if text), "")


def choose_run(runs: Iterable[ClusterRun], wanted: str) -> ClusterRun:
    """The newest run of a name, folder, job or submission.

    Raises:
        UserInputError: there is none, or there are several of that name in different folders.
    """
    listed = list(runs)
    found = [run for run in listed if wanted in (run.name, run.status.run, run.job, run.submission)]
    folders = {run.status.run for run in found}
    if len(folders) == 1:
        return found[-1]
    names = ", ".join(sorted(folders or {run.status.run for run in listed})) or "none"
    raise UserInputError(f"Expected the name, folder or job of one run; found {wanted!r}. Runs there: {names}.")


def collect_logs(
    dashboard: Dashboard, job: str, names: Mapping[str, str], folder: Path, submission: str = ""
) -> tuple[list[Path], list[str]]:
    """Write what the actors of a job printed, on all nodes, into a folder.

    Args:
        dashboard: of the cluster.
        job: Ray's id of it.
        names: of actors, by Ray's id of each.
        folder: made where it is missing.
        submission: id of the submitted job, whose own output is fetched too.

    Returns:
        The files, named ``<actor>-<node>-<process>.<out or err>``; and a line for each node whose logs are not here, or not whole.

    Raises:
        ClusterError: no dashboard answers.
        InfrastructureError: the state of the cluster cannot be read.
        UserInputError: the folder cannot be written.
    """
    actors = dashboard.rows("actors", job_id=job)
    processes = {(row["node_id"], str(row["pid"])): names.get(row["actor_id"], row["class_name"]) for row in actors}
    used = {node for node, _ in processes}
    make_folder(folder)
    written: list[Path] = []
    missing: list[str] = []

    def fetch(row: Mapping[str, Any]) -> None:
        node, deadline = row["node_id"], time.monotonic() + COLLECT_S
        try:
            if row["state"] != ALIVE:
                raise InfrastructureError("it is gone, and its logs with it")
            for file, words in _log_files(dashboard, node, job, submission, processes).items():
                if time.monotonic() > deadline:
                    raise InfrastructureError(f"not all came within {COLLECT_S:.0f} s")
                if content := dashboard.log(node, file, MOST_LINES):
                    path = folder / log_name(words[0], row["node_ip"], *words[1:], suffix=file.partition(".")[2])
                    path.write_bytes(content)
                    written.append(path)
        except InfrastructureError as error:
            missing.append(f"node {row['node_ip']} ({node[:8]}): {error}")

    with ThreadPoolExecutor(NODES_AT_ONCE) as pool:
        asked = [row for row in dashboard.rows("nodes") if row["state"] == ALIVE or row["node_id"] in used]
        list(pool.map(fetch, asked))
    return sorted(written), missing


def _log_files(
    dashboard: Dashboard, node: str, job: str, submission: str, processes: Mapping[tuple[str, str], str]
) -> dict[str, tuple[str, ...]]:
    """A job's on a node, each with the name of its actor and the process."""
    found: dict[str, tuple[str, ...]] = {}
    for file in dashboard.log_files(node, "worker-*-*-*.*"):
        of_job, pid = re.split(r"[-.]", file)[2:4]
        # A process that Ray started before it had work has no job in the name.
        if of_job == job or (of_job == NO_JOB and (node, pid) in processes):
            found[file] = processes.get((node, pid), "worker"), pid
    if submission:
        found |= dict.fromkeys(dashboard.log_files(node, f"job-driver-{glob.escape(submission)}.log"), ("driver",))
    return found


def bring_logs(status: StatusFile, folder: Path, tell: Callable[[str], None]) -> None:
    """Fetch what the actors of a driver's own job printed, if it runs on a cluster: their last lines may not have reached it.

    Args:
        status: the driver's.
        folder: of the files.
        tell: takes a line about what is there and what is missing.
    """
    if not status.dashboard:
        return
    try:
        written, missing = collect_logs(Dashboard(status.dashboard), status.job, status.shown.actors, folder)
    except (TrialRayError, OSError) as error:
        written, missing = [], [first_line(error)]
    for line in (f"{len(written)} files in {folder}", *missing):
        tell(f"logs of actors: {line}")


def log_name(*words: str, suffix: str) -> str:
    """A file's name of words that other machines have said, which lead into no other folder."""
    return "-".join(re.sub(r"[^\w.]+", "-", word) for word in words if word) + re.sub(r"[^\w.]", "", f".{suffix}")
