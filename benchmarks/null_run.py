"""A run of the real algorithm whose engines, environment and learner's passes cost nothing: what remains is ours."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import gymnasium
import numpy as np
import psutil
import ray
import torch
from gymnasium.spaces import Text
from null_engine import NullEngine
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray import GRPOConfig
from trial_ray.algorithms.grpo import GRPO
from trial_ray.algorithms.overlap import OverlappingSampler
from trial_ray.algorithms.sampling import BatchSampler
from trial_ray.engines import pool
from trial_ray.engines.pool import EnginePool
from trial_ray.learner import exchange
from trial_ray.learner.connectors import Scoring
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.learner import GRPOLearner
from trial_ray.learner.packing import Row
from trial_ray.learner.passes import MicrobatchPasses
from trial_ray.learner.rows import TurnRows
from trial_ray.learner.update_plan import Microbatch
from trial_ray.models.module import CausalLMModule
from trial_ray.ray_internals import env_runner_actors, learner_actors
from trial_ray.rollout.trajectory import Trajectory

MOST_TASKS = 1024
_ROOM = (
    "You open the cabinet 2. The cabinet 2 is open. In it, you see a bowl 1, a plate 2, and a soapbar 1. ",
    "On the countertop 1, you see a bread 1, a knife 3, a mug 2, a pan 1, and a tomato 1. ",
    "You arrive at the shelf 3. On the shelf 3, you see nothing. ",
)


class NullEnv(gymnasium.Env[str, str]):
    """Texts of a household that nothing changes; every second episode of an instance is won in its last turn."""

    ENV_ID: ClassVar[str] = "benchmark/Null-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, turns: int = 4) -> None:
        self.observation_space = self.action_space = Text(10_000)
        self._turns = turns
        self._episodes = 0

    def tasks(self, split: str | None = None) -> list[str]:
        return [f"task {index}" for index in range(MOST_TASKS)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._task, self._step = str((options or {})["task"]), 0
        self._episodes += 1
        return self._observation(), self._info(won=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._step += 1
        over = self._step == self._turns
        won = over and self._episodes % 2 == 0
        return self._observation(), float(won), over, False, self._info(won)

    def _observation(self) -> str:
        return "".join(
            _ROOM[(self._step + index) % len(_ROOM)] for index in range(1 + (self._step + len(self._task)) % 4)
        )

    def _info(self, won: bool) -> dict[str, Any]:
        return {
            "task": "put a mug in the cabinet",
            "task_id": self._task,
            "family": "null",
            "admissible_actions": [],
            "won": won,
            "score": float(won),
        }


class NullScoring(Scoring):
    """Takes the engine's word for every token."""

    def _score(self, module: CausalLMModule, rows: Sequence[Row], metrics: MetricsLogger) -> dict[str, torch.Tensor]:
        tokens = sum(len(np.concatenate([row.prompt_ids, row.response_ids])[len(row.prompt_ids) :]) for row in rows)
        return {"logprobs": torch.full((tokens,), -1.0)}


class NullPasses(MicrobatchPasses):
    """Makes the model's inputs, and neither passes nor gradients."""

    def backward(self, table: TurnRows, microbatches: Sequence[Microbatch], iteration: int, clamp: Any = None) -> float:
        for each in microbatches:
            self.counts.forwarded += sum(len(row.sequence.ids) for row in table.model_rows(each.rows))
        return 0.0


@dataclass
class Received:
    """Bytes that reached a learner for an update; scores and gradients, which learners add up, are not among them.

    Attributes:
        headers: of all groups.
        references: to groups, and to the parts of those that it fetched something of.
        rows: of each part of a group that it fetched, by the object's id.
        exchanged: turns that other learners sent.
    """

    headers: int = 0
    references: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    exchanged: int = 0

    @property
    def total(self) -> int:
        return self.headers + self.references + sum(self.rows.values()) + self.exchanged


def stored_bytes(value: Any) -> int:
    """Bytes of a value in the object store, references in it included."""
    ref = ray.put(value)
    size: int = ray.experimental.get_local_object_locations([ref])[ref]["object_size"]
    return size


class NullLearner(GRPOLearner):
    """Everything of an update but the model's passes.

    Attributes:
        received: for the last update.
    """

    def build(self) -> None:
        super().build()
        self.update_rows.scoring = NullScoring(self.config, self.exchange)
        self.passes = NullPasses(self.policy_module, self.method, self.config, self.means)
        self.received = Received()

    def update(self, training_data: TrainingGroups, **kwargs: Any) -> dict[str, Any]:
        headers = sum(len(refs.packed_header) for refs in training_data.episodes_refs)
        self.received = Received(headers, references=stored_bytes(training_data) - headers)
        with self._counting():
            return super().update(training_data, **kwargs)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Note the size of what the exchange gets from the object store and from other learners."""
        get, swap, received = ray.get, self.exchange.swap, self.received

        def counted(refs: list[Any], **options: Any) -> list[Any]:
            values = get(refs, **options)
            for ref, value in zip(refs, values, strict=True):
                if isinstance(value[0], Trajectory):
                    received.rows[ref.hex()] = stored_bytes(value)
                else:
                    received.references += stored_bytes(value)
            return values

        def counted_swap(*args: Any) -> list[bytes]:
            values = swap(*args)
            received.exchanged += sum(map(len, values))
            return values

        with mock.patch.object(exchange.ray, "get", counted), mock.patch.object(self.exchange, "swap", counted_swap):
            yield


class NullAlgorithm(GRPO):
    """GRPO whose engines are null engines.

    Attributes:
        phase_cpu: seconds of this process's CPU time by phase, since it was last emptied.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.phase_cpu: defaultdict[str, float] = defaultdict(float)
        super().__init__(*args, **kwargs)

    def _create_engine_pool(self, bundles: list[dict[str, float]]) -> EnginePool:
        with mock.patch.object(pool, "engine_class", return_value=NullEngine):
            return super()._create_engine_pool(bundles)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        with super()._phase(name):
            yield
        self.phase_cpu[name] += time.process_time() - began


class NullConfig(GRPOConfig):
    """Config of :class:`NullAlgorithm` and :class:`NullLearner`."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or NullAlgorithm)

    def get_default_learner_class(self) -> type:
        return NullLearner


def null_config(
    model_path: str,
    *,
    env_runners: int = 1,
    engines: int = 1,
    learners: int = 1,
    tasks: int = 16,
    group_size: int = 8,
    turns: int = 4,
) -> NullConfig:
    """``turns`` of an episode; the other arguments as the settings of their names."""
    if NullEnv.ENV_ID not in gymnasium.registry:
        gymnasium.register(NullEnv.ENV_ID, entry_point=NullEnv)
    share = 0.01  # of a logical CPU, of which Ray has two: as many actors as memory allows
    return (
        NullConfig()
        .environment(NullEnv.ENV_ID, env_config={"turns": turns})
        .rl_module(model_path=model_path)
        .training(group_size=group_size, tasks_per_iteration=tasks, kl_coeff=0.0, max_logprob_gap=100.0)
        .env_runners(max_prompt_tokens=1024, max_response_tokens=64, prompt_style="plain")
        .env_runners(num_env_runners=env_runners, num_cpus_per_env_runner=share)
        .engines(engine="transformers", num_engines=engines, num_cpus_per_engine=share)
        .learners(num_learners=learners, num_cpus_per_learner=share)
        .resources(num_cpus_for_main_process=share)
        .debugging(seed=0)
    )


class Usage:
    """CPU seconds of the processes of a run, and calls of its engines, between two looks.

    Args:
        algorithm: the run.
    """

    def __init__(self, algorithm: NullAlgorithm) -> None:
        self._algorithm = algorithm
        runners = list(env_runner_actors(algorithm.env_runner_group).values())
        actors = {"runners": runners, "engines": algorithm.engine_pool.handles}
        actors["learners"] = learner_actors(algorithm.learner_group)
        self._processes = {
            kind: [psutil.Process(pid) for pid in ray.get([each.__ray_call__.remote(_pid) for each in handles])]
            for kind, handles in actors.items()
        }
        self._processes["driver"] = [psutil.Process()]

    def look(self) -> dict[str, float]:
        """CPU seconds so far by kind of actor, ``"driver"`` included, and ``"exchanges"`` with engines."""
        seconds = {kind: sum(map(cpu_seconds, processes)) for kind, processes in self._processes.items()}
        reports = self._algorithm.engine_pool.reports(60.0)
        return seconds | {"exchanges": sum(report["exchanges"] for report in reports if report)}

    def memory_mb(self) -> dict[str, float]:
        """Mean memory of an actor by kind: pages of its own, and its share of those that several processes have."""
        return {
            kind: sum(process.memory_full_info().pss for process in processes) / len(processes) / 1e6
            for kind, processes in self._processes.items()
        }


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _pid(actor: Any) -> int:
    import os

    return os.getpid()


def with_tasks(algorithm: NullAlgorithm, tasks: int, max_staleness: int = 0) -> None:
    """Let the next iterations play so many tasks."""
    config = algorithm.config.copy(copy_frozen=False).training(tasks_per_iteration=tasks)
    arguments = config.env_runners(max_staleness=max_staleness), algorithm.tasks, algorithm.workers
    algorithm.workers.abandon_groups()
    if max_staleness:
        algorithm.sampler = OverlappingSampler(*arguments, version=lambda: algorithm.weight_version)
    else:
        algorithm.sampler = BatchSampler(*arguments)


def iterate(algorithm: NullAlgorithm, usage: Usage) -> dict[str, Any]:
    """One iteration: seconds, CPU seconds by kind of actor and phase of the driver, turns, and what learners received."""
    algorithm.phase_cpu.clear()
    before, began = usage.look(), time.perf_counter()
    driver = time.process_time()
    result = algorithm.train()
    point: dict[str, Any] = {"driver_cpu_s": time.process_time() - driver, "seconds": time.perf_counter() - began}
    after = usage.look()
    point |= {f"{kind}_cpu_s": after[kind] - before[kind] for kind in ("runners", "engines", "learners")}
    point["exchanges"] = after["exchanges"] - before["exchanges"]
    point["phases_cpu_s"] = dict(algorithm.phase_cpu)
    point["turns"] = result["env_runners"]["num_env_steps_sampled"]
    point["groups"] = result["groups"]["num_trained"]
    return point


def received(algorithm: NullAlgorithm) -> list[Received]:
    """What reached each learner for the last update."""
    return [each.get() for each in algorithm.learner_group.foreach_learner(lambda learner: learner.received)]
