"""Pool of the engines of a run: starts them, sends them weights, monitors and replaces them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import wait
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trial_ray.engines.protocol import EnginePart
from trial_ray.engines.requirements import require_engine_arguments
from trial_ray.engines.settings import LOG_LEVEL
from trial_ray.engines.weights import Weights
from trial_ray.errors import CannotServeError, ConfigError, EngineError, WeightSyncError, first_line
from trial_ray.files import Json
from trial_ray.process import read_progress
from trial_ray.ray_internals import actor_id

FAULTS = "faults"
"""Key, in the result of an iteration, of the text about lost and replaced actors; absent if no actor was lost."""
MAX_LOSSES_SHOWN = 3
"""Maximum number of lost actors that :meth:`FaultLog.pop_line` lists; further lost actors are only counted."""


class FaultLog:
    """Log of the actors that were lost since the last :meth:`pop_line`.

    Attributes:
        losses: reasons why actors were lost, one line each, the earliest first.
        played_again: number of rollout groups, or episodes of an evaluation set, that were started again.
        seconds: time that the driver waited for replacements.
    """

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.played_again = 0
        self.seconds = 0.0

    def note(self, loss: str) -> None:
        """Record that an actor was lost, with the first line of ``loss``, the reason."""
        self.losses.append(loss.splitlines()[0].rstrip("."))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time inside the context to the time spent waiting for replacements."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def pop_line(self) -> str:
        """Return a line about the lost actors, empty if there are none, and clear the log."""
        losses, cost = self.losses, f"played again: {self.played_again}, waited {self.seconds:.1f} s"
        self.losses, self.played_again, self.seconds = [], 0, 0.0
        more = [f"and {len(losses) - MAX_LOSSES_SHOWN} more"] if len(losses) > MAX_LOSSES_SHOWN else []
        return f"replaced: {'; '.join(losses[:MAX_LOSSES_SHOWN] + more)} ({cost})" if losses else ""


logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 1024
"""Maximum number of calls that one engine actor serves at a time; the engine itself batches them."""
LOAD_TIMEOUT_S = 900.0
"""Deadline in seconds for an idle engine to load weights, sleep or wake. If fewer engines than the minimum are left, it also limits
the wait for replacements."""
DRAIN_MARGIN_S = 60.0
"""Seconds for which engines wait for running responses after ``request_timeout_s``, the deadline of the clients."""
REPLACEMENT_ATTEMPTS = 3
"""Number of attempts to replace an engine if fewer than the minimum are left. Ray takes a while to detect a lost
node, and places new actors on it until then."""
PROBE_TIMEOUT_S = 30.0
"""Seconds after which an engine that does not answer counts as dead, and an engine that does not shut down is killed."""


class EnginePool:
    """Identical engine actors of the training process: a fixed number, or as many as the nodes have room for.

    The pool waits only for the minimum number of engines. Further engines, and replacements of lost engines, are requested from
    Ray and join when they have started, on any node with room. For engines that do not fit, Ray's autoscaler can add nodes.

    The constructor does not wait for the engines; :meth:`start` does. The replacement of engine ``i`` has the same index. Ray
    does not restart engines or retry their calls, because a restarted engine would answer with the initial weights.

    Args:
        engine: ``"vllm"`` or ``"transformers"``.
        model_path: folder in the Hugging Face format, visible to every engine's node.
        num_engines: minimum number of engines, without which the pool does not work; 1 or more.
        max_engines: maximum number of engines after :meth:`grow`; ``None`` takes ``num_engines``.
        engine_kwargs: further arguments of the engine class: ``max_model_len``, and for vLLM also fields of its ``EngineArgs``.
        request_timeout_s: deadline of a response in seconds; new weights wait a minute longer for running responses.
        num_cpus_per_engine: Ray CPUs of one engine.
        num_gpus_per_engine: Ray GPUs of one engine.
        custom_resources_per_engine: amounts of Ray's custom resources that one engine takes, by name; ``None`` if none.
        placement_group: group with the reserved resources of the engines; ``None`` uses the group of this process, if any.
        placement_group_bundle_offset: inside a placement group, engine ``i`` takes bundle ``offset + i``; with ``None``,
            it takes any bundle.

    Attributes:
        faults: log of the engines and env runners that were lost.

    Raises:
        ConfigError: the engine is unknown, ``num_engines`` is less than 1, or the engine does not accept an argument.
        MissingDependencyError: the package of the engine is not installed.
    """

    def __init__(
        self,
        *,
        engine: str,
        model_path: str,
        num_engines: int,
        max_engines: int | None = None,
        engine_kwargs: Json | None = None,
        request_timeout_s: float = 600.0,
        num_cpus_per_engine: float = 1,
        num_gpus_per_engine: float = 0,
        custom_resources_per_engine: dict[str, float] | None = None,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_offset: int | None = None,
    ) -> None:
        if num_engines < 1:
            raise ConfigError(f"num_engines: expected at least 1, got {num_engines}.")
        kwargs = self._kwargs = dict(engine_kwargs or {})
        actor_class = require_engine_arguments(engine, model_path, kwargs, num_gpus_per_engine)
        if engine == "transformers" and not num_gpus_per_engine:
            kwargs.setdefault("device", "cpu")  # Ray does not hide GPUs from actors that request none.
        if engine == "vllm" and (level := os.environ.get(LOG_LEVEL)):
            # Engines on other nodes do not inherit this process's environment.
            kwargs.setdefault("log_level", level)
        self._actor_class: Any = ray.remote(actor_class)
        self._model_path = model_path
        self._options = {
            "num_cpus": num_cpus_per_engine,
            "num_gpus": num_gpus_per_engine,
            "resources": custom_resources_per_engine or {},
            "max_concurrency": MAX_CONCURRENCY,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        self._group = placement_group or ray.util.get_current_placement_group()
        self._offset = placement_group_bundle_offset
        self._min_engines = self._num_requested = num_engines
        self._max_engines = max_engines or num_engines
        self._drain_timeout_s = request_timeout_s + DRAIN_MARGIN_S
        self._starts = itertools.count()
        self._weights: Weights | None = None
        self.faults = FaultLog()
        self._engines = {index: self._spawn(index) for index in range(num_engines)}
        self._starting: dict[int, tuple[ActorHandle[Any], ObjectRef[Any]]] = {}

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """Serving engines, for a :class:`~trial_ray.engines.client.EngineClient`; the list changes as engines join and leave."""
        return [*self._engines.values()]

    def start(self, timeout_s: float = 600.0) -> list[Json]:
        """Wait until all serving engines are ready; return the result of each engine's ``ready``.

        Raises:
            EngineError: an engine failed to start, or did not start within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        return [
            self._result(ref, index, "start", max(0.0, deadline - time.monotonic()))
            for index, ref in self._call("ready").items()
        ]

    def grow(self) -> None:
        """Request the engines beyond the minimum from Ray, without waiting; :meth:`adapt` adds them once they have started."""
        self._num_requested = self._max_engines
        self._request_missing()

    def adapt(self, leaving: Collection[str]) -> None:
        """Replace engines on nodes that will be removed, and add engines that have started; call :meth:`sync` afterwards.

        If the pool has only the minimum number of engines, an engine on such a node stays until its replacement serves.

        Args:
            leaving: ids of the nodes that will be removed.
        """
        indices = [index for index, handle in self._engines.items() if runs_on(handle, leaving)]
        for index in indices:
            if index not in self._starting:
                self.faults.note(f"engine {index} was on a node that is being removed")
                self._request(index)
        self._request_missing()
        self._add_started()
        for index in indices:
            if index in self._starting and len(self._engines) > self._min_engines:
                ray.kill(self._engines.pop(index))

    def renew(self) -> None:
        """Prepare for another run: drop the last run's weights, which can no longer be sent, and replace dead engines.

        Raises:
            EngineError: a replacement did not start.
        """
        self._weights = None
        self.probe_and_restart()
        self.faults = FaultLog()

    def sync(
        self,
        weights: Weights,
        *,
        send: Callable[[], object] = lambda: None,
        resend: Callable[[], Weights] | None = None,
    ) -> None:
        """Load one version of the weights into every engine; check the checksum that each reports, and replace dead engines.

        Args:
            weights: weights that the engines load.
            send: called while the engines load; the learners broadcast the weights in this call if they use NCCL.
            resend: returns the same weights again, for engines that start later; ``None`` if ``weights`` stay readable.

        Raises:
            WeightSyncError: the weights of an engine differ from the sent weights.
            EngineError: an engine failed or did not answer in time, or too few engines are left.
        """
        self._weights, self._resend = weights, resend or (lambda: weights)
        pending = self._call("load_weights", weights, self._drain_timeout_s)
        send()
        self._replace(self._unconfirmed(pending))

    def sleep(self, level: int = 1) -> None:
        """Make every engine release its device's memory once the running responses have finished.

        A dead engine is replaced only by the next :meth:`sync`, because a replacement would occupy the released memory.

        Args:
            level: 1 keeps the weights in the hosts' memory, 2 drops them.

        Raises:
            EngineError: an engine failed, or did not answer in time.
        """
        self._results(self._call("sleep", level, self._drain_timeout_s), "fall asleep")

    def wake(self, part: EnginePart) -> bool:
        """Allocate a part of every sleeping engine again; return whether an engine died.

        Args:
            part: ``"weights"`` before a :meth:`sync`, and the key-value ``"cache"`` after it.

        Raises:
            EngineError: an engine failed, or did not answer in time.
        """
        hint = " (if the learner left too little memory, lower gpu_memory_utilization or kv_cache_gib in engine_kwargs)"
        return len(self._results(self._call("wake", part), f"wake its {part}", hint)) < len(self._engines)

    def abort(self, client: str) -> None:
        """Stop sampling responses for a client that is gone, without waiting.

        Args:
            client: the ``owner`` of the client's ``EngineClient``.
        """
        self._call("abort", f"{client}/")

    def _call(self, method: str, *arguments: Any) -> dict[int, ObjectRef[Any]]:
        """Call a method of every serving engine; return the calls by engine index."""
        return {index: getattr(handle, method).remote(*arguments) for index, handle in self._engines.items()}

    def _results(self, refs: dict[int, ObjectRef[Any]], action: str, hint: str = "") -> dict[int, Any]:
        """Return the results of calls by engine index; engines that died or cannot serve are killed and have no result."""
        results = {}
        for index, ref in refs.items():
            try:
                results[index] = self._result(ref, index, action, LOAD_TIMEOUT_S + self._drain_timeout_s, hint)
            except CannotServeError as error:
                logger.warning("%s; it is replaced, at the latest with the next weights", error)
                # The engine's process may still run, and would keep the device's memory.
                ray.kill(self._engines[index])
        return results

    def probe_and_restart(self) -> list[int]:
        """Replace engines that are dead, do not answer, or lack the weights of the last :meth:`sync`.

        If the minimum number of engines is left, the pool continues with them and does not wait for the replacements.

        Returns:
            Indices of the lost engines.

        Raises:
            EngineError, WeightSyncError: a replacement did not start, or did not load the weights of the last :meth:`sync`.
        """
        lost = []
        for index, ref in self._call("weight_version").items():
            try:
                version = ray.get(ref, timeout=PROBE_TIMEOUT_S)
            except RayError as error:
                reason = f"does not answer ({type(error).__name__})"
            else:
                if self._weights is None or version == self._weights.version:
                    continue
                reason = f"has weights of version {version} in place of {self._weights.version}"
            logger.warning("engine %d %s; it is replaced", index, reason)
            self.faults.note(f"engine {index} {reason}")
            lost.append(index)
        self._replace(lost)
        return lost

    def restore(self) -> None:
        """Replace engines that are missing because a replacement failed; raises the errors of :meth:`probe_and_restart`."""
        self._replace([])

    def stop(self) -> None:
        """Shut down all engines at the same time; engines that take longer than :data:`PROBE_TIMEOUT_S` seconds are killed."""
        refs = self._call("shutdown")
        ended = ray.wait([*refs.values()], num_returns=len(refs), timeout=PROBE_TIMEOUT_S)[0] if refs else []
        for index, ref in refs.items():
            if ref not in ended:
                logger.warning("engine %d did not shut down", index)
        for handle in [*self._engines.values(), *(handle for handle, _ in self._starting.values())]:
            ray.kill(handle)
        self._engines, self._starting, self._weights = {}, {}, None

    def _spawn(self, index: int) -> ActorHandle[Any]:
        options, kwargs = self._options, self._kwargs
        if self._group is not None:
            bundle = -1 if self._offset is None else self._offset + index
            options = {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle, True)}
        if kwargs.get("seed") is not None:  # Engines with equal seeds would repeat each other's responses.
            kwargs = {**kwargs, "seed": kwargs["seed"] + next(self._starts)}
        return self._actor_class.options(**options).remote(self._model_path, **kwargs)

    def _request_missing(self) -> None:
        for index in {*range(self._num_requested)} - self._engines.keys():
            self._request(index)

    def _request(self, index: int) -> None:
        """Request an engine from Ray, unless it has been requested already."""
        if index not in self._starting:
            handle = self._spawn(index)
            self._starting[index] = (handle, handle.ready.remote())

    def _replace(self, lost: list[int]) -> None:
        """Request replacements of lost engines, add the engines that have started, and send them the weights."""
        for _ in range(REPLACEMENT_ATTEMPTS):
            # Even if no engine was lost now, engines can be missing since an earlier replacement failed.
            if not lost and len(self._engines) >= self._min_engines:
                return
            with self.faults.waiting():
                for index in lost:
                    ray.kill(self._engines.pop(index))
                self._request_missing()
                added, lost = self._add_started(), []
                if added and self._weights is not None:
                    sent = self._resend()
                    lost = self._unconfirmed({index: self._engines[index].load_weights.remote(sent) for index in added})
        if lost:
            raise EngineError(f"Engine {lost[0]} died {REPLACEMENT_ATTEMPTS} times while it loaded weights.")

    def _add_started(self) -> list[int]:
        """Add engines that have started, waiting only while fewer than the minimum serve; return their indices.

        Raises:
            EngineError: too few engines are left, and no other started within :data:`LOAD_TIMEOUT_S` seconds.
        """
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        added: list[int] = []
        failures: Counter[int] = Counter()
        while self._starting:
            needed = len(self._engines) < self._min_engines
            wait_s = max(0.0, deadline - time.monotonic()) if needed else 0.0
            indices = {ref: index for index, (_, ref) in self._starting.items()}
            ready, _ = ray.wait([*indices], num_returns=1, timeout=wait_s)
            if not ready:
                break
            index = indices[ready[0]]
            handle, ref = self._starting.pop(index)
            try:
                self._result(ref, index, "start", PROBE_TIMEOUT_S)
            except EngineError as error:
                failures[index] += 1
                if needed and failures[index] == REPLACEMENT_ATTEMPTS:
                    raise
                logger.warning("%s; it is started again", first_line(error))
                if needed:  # If enough engines serve, the next adapt() requests this engine again.
                    self._request(index)
                continue
            if (replaced := self._engines.get(index)) is not None:
                ray.kill(replaced)
            self._engines = dict(sorted({**self._engines, index: handle}.items()))
            added.append(index)
        if len(self._engines) < self._min_engines:
            raise EngineError(
                f"{len(self._engines)} engines are left, expected at least {self._min_engines}, and no other started within "
                f"{LOAD_TIMEOUT_S:.0f} s. Start nodes, or lower num_engines."
            )
        return added

    def _unconfirmed(self, pending: dict[int, ObjectRef[tuple[int, str]]]) -> list[int]:
        """Wait until engines have confirmed the weights; return the indices of engines that died before confirming them."""
        sent = self._weights
        assert sent is not None
        results = self._results(pending, "load weights")
        for index, (version, checksum) in results.items():
            if (version, checksum) != (sent.version, sent.checksum):
                raise WeightSyncError(
                    f"Engine {index} has version {version} with checksum {checksum}; the learner sent version {sent.version} with "
                    f"checksum {sent.checksum}. Sampling is off-policy unless both agree."
                )
        died = [index for index in pending if index not in results]
        for index in died:
            self.faults.note(f"engine {index} died before it could load weights")
        return died

    @staticmethod
    def _result(ref: ObjectRef[Any], index: int, action: str, timeout_s: float, hint: str = "") -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise EngineError(f"Engine {index} did not {action} within {timeout_s:.0f} s.") from error
        except RayTaskError as error:
            types = (WeightSyncError, CannotServeError)
            error_type = next((type_ for type_ in types if isinstance(error.cause, type_)), EngineError)
            raise error_type(f"Engine {index} failed to {action}: {error.cause}{hint}") from error
        # The error is a RayActorError, or an OutOfMemoryError if Ray killed the process because memory ran out.
        except RayError as error:
            raise CannotServeError(f"engine {index} died before it could {action}: {error}") from error


def runs_on(handle: ActorHandle[Any], nodes: Collection[str]) -> bool:
    """Return whether an actor runs on one of these nodes; an actor that has not started does not."""
    progress = read_progress(actor_id(handle)) if nodes else None
    return progress is not None and progress.node in nodes


def answers(calls: list[ObjectRef[Any]], timeout_s: float) -> list[Any | None]:
    """Return the result of each actor call; ``None`` for a call that failed or did not return within ``timeout_s`` seconds."""
    futures = [call.future() for call in calls]
    ended, _ = wait(futures, timeout_s)
    return [future.result() if future in ended and future.exception() is None else None for future in futures]
