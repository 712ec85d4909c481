"""Runs of a few tiny iterations on real actors, in which something is done to a process at a chosen moment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_checks import lost_rows
from faulty_env import CountingEnv
from rich.console import Console
from tiny_run import config_of

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.runs.checkpoints import find_model, list_checkpoints
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.session import TrainingSession


def tiny_config(model_path: str, *, num_learners: int = 0, **recovery: Any) -> GRPOConfig:
    """Seeded: two runs of it end with the same weights."""
    config = config_of(
        model_path, group_size=4, minibatch_rows=12, microbatch_rows=6, invalid_action_penalty=0.5, advantage_statistics="rows"
    )  # fmt: skip
    return (
        config.environment(CountingEnv.ENV_ID, env_config={"split": "train"})
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
        .learners(num_learners=num_learners)
        .fault_tolerance(**recovery)
    )


STALL_S, ENDING = 5.0, "no progress for"
Fault = tuple[int, str, int, Callable[["FaultyRun"], None]]
"""Which algorithm that the run builds, from 1, in which phase of which iteration, and what is done to the run then."""


class FaultyRun:
    """A training session of three iterations, and the algorithms that it has built.

    Args:
        folder: of the run; must not exist.
        config: of the run.
    """

    def __init__(self, folder: Path, config: GRPOConfig) -> None:
        self.folder = RunFolder.create(folder, config, Path(__file__), [])
        self.folder.configure(config)
        self.console = io.StringIO()
        self.algorithms: list[Any] = []
        self.ended = threading.Event()
        console = Console(file=self.console, width=200)
        self.session = TrainingSession(config, {"training_iteration": 3}, self.folder, console, checkpoint_every=1)
        build = self.session._build

        def noted() -> Any:
            self.algorithms.append(build())
            return self.algorithms[-1]

        self.session._build = noted

    def run_with(self, *faults: Fault) -> str:
        """Run, and do one thing after the other; returns what was printed. No row is lost, and none is trained twice."""
        done: list[Fault] = []

        def watch() -> None:
            for fault in faults:
                attempt, phase, iteration, do = fault
                while not self._is_in(attempt, phase, iteration):
                    if self.ended.wait(0.002):
                        return
                done.append(fault)
                do(self)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            self.session.run(contextlib.nullcontext())
        finally:
            self.ended.set()
            thread.join(60)
            print(self.console.getvalue())
            assert len(done) == len(faults), "the moment of a fault never came"
        lines = [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]
        assert [line["iteration"] for line in lines] == self.folder.recorded_iterations() == [1, 2, 3]
        assert sum(map(lost_rows, lines)) == 0
        assert self.folder.state() == "done"
        return self.console.getvalue()

    def _is_in(self, attempt: int, phase: str, iteration: int) -> bool:
        if len(self.algorithms) != attempt:
            return False
        algorithm = self.algorithms[-1]
        return bool(algorithm.phase == phase and algorithm.iteration == iteration - 1)

    def weights(self) -> bytes:
        """The model of the newest checkpoint."""
        return (find_model(list_checkpoints(self.folder.checkpoints)[-1]) / "model.safetensors").read_bytes()


def pid(algorithm: Any, kind: str) -> int:
    """Of the process of the first actor of a kind."""
    return int(next(each for each in algorithm.actors() if each.kind == kind).progress().pid)


def kill(kind: str) -> Callable[[FaultyRun], None]:
    """What kills an actor of a run."""
    return lambda run: os.kill(pid(run.algorithms[-1], kind), signal.SIGKILL)


def hang(kind: str) -> Callable[[FaultyRun], None]:
    """What stops an actor of a run, whose watchdog is in a hurry until it has noticed: what is slow is not taken for a stall."""

    def do(run: FaultyRun) -> None:
        os.kill(pid(run.algorithms[-1], kind), signal.SIGSTOP)
        watchdog, patience = run.session.watchdog, run.session.watchdog.timeout_s
        watchdog.timeout_s = STALL_S
        while ENDING not in run.console.getvalue() and not run.ended.wait(0.002):
            pass
        watchdog.timeout_s = patience

    return do
