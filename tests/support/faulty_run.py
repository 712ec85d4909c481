"""Runs of a few tiny iterations on real actors, in which something is done to a process at a chosen moment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from fault_table import lost_rows
from faulty_env import CountingEnv
from rich.console import Console
from tiny_run import with_small_actors

from trial_ray.algorithms.actors import RunActor
from trial_ray.algorithms.config import GRPOConfig
from trial_ray.runs.checkpoints import find_model, list_checkpoints
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.session import TrainingSession


def tiny_config(model_path: str, *, num_learners: int = 0, **recovery: Any) -> GRPOConfig:
    """Seeded: two runs of it end with the same weights."""
    return (
        with_small_actors(GRPOConfig())
        .environment(CountingEnv.ENV_ID, env_config={"split": "train"})
        .rl_module(model_path=model_path)
        .training(
            lr=1e-3, group_size=4, tasks_per_iteration=2, minibatch_rows=12, microbatch_rows=6, kl_coeff=0.0,
            invalid_action_penalty=0.5, advantage_statistics="rows",
        )
        .env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", seeded_sampling=True)
        .learners(num_learners=num_learners)
        .fault_tolerance(**recovery)
    )  # fmt: skip


Fault = tuple[int, str, int, Callable[[Any], None]]
"""Which algorithm that the run builds, from 1, in which phase of which iteration, and what is done to it then."""


class FaultyRun:
    """A training session, and the algorithm that it has built last.

    Args:
        folder: of the run; must not exist.
        config: of the run.
        iterations: to train.
        session: further arguments of ``TrainingSession``.
    """

    def __init__(self, folder: Path, config: GRPOConfig, iterations: int, **session: Any) -> None:
        self.folder = RunFolder.create(folder, config, Path(__file__), [])
        self.folder.configure(config)
        self.printed = io.StringIO()
        self.algorithms: list[Any] = []
        console = Console(file=self.printed, width=200)
        stop = {"training_iteration": iterations}
        self.session = TrainingSession(config, stop, self.folder, console, checkpoint_every=1, **session)
        build = self.session._build

        def noted() -> Any:
            self.algorithms.append(build())
            return self.algorithms[-1]

        self.session._build = noted

    def run_with(self, *faults: Fault) -> list[float]:
        """Run, and do one thing after the other; returns the seconds from each to the end of the next iteration."""
        began: list[float] = []
        seconds: list[float] = []
        ended = threading.Event()

        def watch() -> None:
            for attempt, phase, iteration, do in faults:
                while not self._is_in(attempt, phase, iteration):
                    if ended.wait(0.002):
                        return
                began.append(time.monotonic())
                do(self.algorithms[-1])

        def note(metrics: dict[str, float]) -> None:
            if len(seconds) < len(began):
                seconds.append(time.monotonic() - began[-1])

        self.session.on_iteration = note
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            self.session.run(contextlib.nullcontext())
        finally:
            ended.set()
            thread.join(60)
            assert len(began) == len(faults), "the moment of a fault never came"
        return seconds

    def _is_in(self, attempt: int, phase: str, iteration: int) -> bool:
        if len(self.algorithms) != attempt:
            return False
        algorithm = self.algorithms[-1]
        return bool(algorithm.phase == phase and algorithm.iteration == iteration - 1)

    def lost(self) -> int:
        """Rows that no iteration's metrics account for."""
        return sum(lost_rows(json.loads(line)) for line in self.folder.metrics.read_text().splitlines())

    def weights(self) -> bytes:
        """The model of the newest checkpoint."""
        return (find_model(list_checkpoints(self.folder.checkpoints)[-1]) / "model.safetensors").read_bytes()


def actor(algorithm: Any, kind: str, index: int = 0) -> RunActor:
    """The ``index``-th actor of a kind."""
    return [each for each in algorithm.actors() if each.kind == kind][index]


def pid(of: RunActor) -> int:
    progress = of.progress()
    assert progress is not None
    return progress.pid


def send(kind: str, number: int, index: int = 0) -> Callable[[Any], None]:
    """What sends a signal to an actor of an algorithm."""
    return lambda algorithm: os.kill(pid(actor(algorithm, kind, index)), number)


def pids(algorithm: Any) -> list[int]:
    """Of all actors."""
    return [pid(each) for each in algorithm.actors()]


def left(of: list[int]) -> list[int]:
    """Those of the processes that still are."""
    return [each for each in of if psutil.pid_exists(each)]
