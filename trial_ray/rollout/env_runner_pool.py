"""Env runners connected to their engines: play groups for training, and single episodes for evaluation."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import EnginePool, runs_on
from trial_ray.errors import InfrastructureError, NotConnectedError, root_cause
from trial_ray.ray_internals import (
    actor_id,
    count_dropped,
    draining_nodes,
    env_runner_actors,
    mark_lost,
)
from trial_ray.rollout.groups import GroupRequest, GroupSample, SampleSettings
from trial_ray.rollout.new_runners import NewRunners

if TYPE_CHECKING:
    from trial_ray.rollout.env_runner import TextEnvRunner

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RESTART_TIMEOUT_S = 180.0
"""Seconds to wait for Ray to restart an env runner if all of them have died."""
WAIT_SECONDS = 2.0
"""Maximum seconds of a call that waits for groups to end; the env runner answers no other calls in this time."""
TAKE_TIMEOUT_S = 120.0
"""Maximum seconds that an env runner may take to record groups that have ended and to hand them over."""
LATE = f"did not hand over its groups within {TAKE_TIMEOUT_S:.0f} s"
LOCAL = 0
"""Id of an env runner in this process."""


class EnvRunnerPool:
    """The env runners of a run, connected to its engines.

    An exception on an env runner is an error of this package's code or its configuration, and is raised again here. An env
    runner that dies or does not answer in time is a loss, which resampling can compensate.

    Args:
        config: limits and deadlines.
        runners: remote env runners, or a single local one if the config has no remote env runners.
        engines: started engines.
        kept: whether the env runners were created for another config and now play with this one.
        on_recreated: called with the ids of env runners that were restarted while groups were played.
    """

    def __init__(
        self,
        config: RunSettings,
        runners: EnvRunnerGroup,
        engines: EnginePool,
        kept: bool = False,
        on_recreated: Callable[[list[int]], None] = lambda runner_ids: None,
    ) -> None:
        self._config = config
        self._runners = runners
        self._engines = engines
        self._losses: list[str] = []
        self._unfinished: dict[int, int] = {}
        self._waits: dict[ObjectRef[int], int] = {}
        self._connected: list[ActorHandle[Any]] = []
        self._new_runners = NewRunners(runners)
        self._leaving: set[int] = set()
        self._kept = kept
        self._on_recreated = on_recreated
        self._logged: dict[bool, list[Mapping[str, Any]]] = {}
        self._connect(None, reset=kept)
        if kept:
            self.restore_runners()

    def stream_groups(
        self, requests: Sequence[GroupRequest], settings: SampleSettings
    ) -> Generator[GroupSample, None, None]:
        """Play an evaluation set's requests; yield each group as soon as it has ended, in any order.

        No other groups may be in flight.

        If no group ends within ``sample_timeout_s`` seconds, the env runners that still play are replaced, and their groups
        are missing.

        Raises:
            RayTaskError: an env runner raised; the error is also an instance of the original exception's class.
            InfrastructureError: no env runner is left, and none was restarted within :data:`RESTART_TIMEOUT_S` seconds.
        """
        self.begin_groups(requests, settings)
        try:
            while self._unfinished:
                samples, dead = self.take_groups({*self._unfinished.values()}, None, self._config.sample_timeout_s)
                if not samples and not dead:
                    self.abandon_late()
                yield from samples
        finally:
            if self._unfinished:
                self.abandon_groups()

    def take_logged(self, in_evaluation: bool) -> list[Mapping[str, Any]]:
        """Return the metrics that callbacks have logged since the last call, as ``MetricsLogger.aggregate`` takes them."""
        return self._logged.pop(in_evaluation, [])

    # -- groups that are played while this process does other things -------------------------------------------------

    def begin_groups(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> dict[int, int]:
        """Send each request to the env runner with the fewest unfinished groups, without waiting for it.

        Returns:
            Id of the env runner of each request, by the requests' indices, which must be new.

        Raises:
            InfrastructureError: no env runner is left, and none was restarted within :data:`RESTART_TIMEOUT_S` seconds.
        """
        runner_ids = self._await_runners()
        if (local := self._local()) is not None:
            local.begin_groups(requests, settings)
            runners = {request.index: LOCAL for request in requests}
            self._unfinished |= runners
            return runners
        staying = [runner_id for runner_id in runner_ids if runner_id not in self._leaving] or runner_ids
        shards: dict[int, list[GroupRequest]] = {runner_id: [] for runner_id in staying}
        unfinished = Counter(self._unfinished.values())
        loads = [(unfinished[runner_id], order, runner_id) for order, runner_id in enumerate(staying)]
        heapq.heapify(loads)
        for request in requests:
            load, order, runner_id = loads[0]
            heapq.heapreplace(loads, (load + 1, order, runner_id))
            shards[runner_id].append(request)
            self._unfinished[request.index] = runner_id
        for runner_id, shard in shards.items():
            if shard:
                self._actor(runner_id).begin_groups.remote(shard, settings)
        return {request.index: self._unfinished[request.index] for request in requests}

    def take_groups(
        self, runner_ids: Collection[int], iteration: int | None, timeout_s: float, together: bool = False
    ) -> tuple[list[GroupSample], list[int]]:
        """Return the groups that have ended since the last call; if necessary, wait for some.

        The wait stops when no further group has ended for ``timeout_s`` seconds. This process owns the groups in the object store:
        they stay when the env runner that played them dies.

        Args:
            runner_ids: env runners that play groups, or have groups that have ended.
            iteration: training iteration in the recording; ``None``: groups of an evaluation set, which are not kept.
            timeout_s: in seconds; an env runner takes up to :data:`WAIT_SECONDS` to report that none of its groups has
                ended.
            together: whether an env runner hands over its groups only when all of them have ended, in one recording.

        Returns:
            The groups, and the ids of env runners that have died or were replaced; the groups of these env runners are
                lost.

        Raises:
            RayTaskError: an env runner raised; the error is also an instance of the original exception's class.
        """
        if (local := self._local()) is not None:
            samples, dead = self._take_local(local, iteration, timeout_s, together), list[int]()
        else:
            ended, dead = self._await_ended(runner_ids, timeout_s, together)
            samples, lost = self._take_ended(ended, iteration)
            dead += lost
        for sample in samples:
            self._unfinished.pop(sample.request.index, None)
        if dead:
            self._unfinished = {index: each for index, each in self._unfinished.items() if each not in dead}
        if local is None:
            # One call stays pending per runner that plays: it fails when the runner dies, even if Ray has restarted the runner
            # before the next call.
            self._await_groups({*self._unfinished.values()}, together)
        self._logged.setdefault(iteration is None, []).extend(sample.logged for sample in samples if sample.logged)
        if iteration is not None and (errors := [error for sample in samples for error in sample.errors]):
            total = sum(len(sample.episodes) for sample in samples)
            logger.warning("%d of %d rollouts failed and are dropped; the first: %s", len(errors), total, errors[0])
        return samples, dead

    def _take_ended(self, ended: Mapping[int, int], iteration: int | None) -> tuple[list[GroupSample], list[int]]:
        """Take groups that have ended, whose numbers ``ended`` has by env runner; return them, and the lost env runners.

        Each iteration takes its groups itself, so that they are recorded in the iteration that counts them.
        """
        calls: dict[ObjectRef[list[GroupSample]], int] = {}
        groups: dict[int, list[ObjectRef[Any]]] = {}
        for runner_id, number in ended.items():
            call: Any = self._actor(runner_id).take_groups.options(num_returns=1 + number)
            first, *groups[runner_id] = call.remote(iteration, number)
            calls[first] = runner_id
        taken, lost = self._answers(calls, TAKE_TIMEOUT_S, LATE)
        return [
            _with_group(sample, group, iteration)
            for runner_id, samples_of_runner in taken.items()
            for sample, group in zip(samples_of_runner, groups[runner_id], strict=True)
        ], lost

    def _await_ended(
        self, runner_ids: Collection[int], timeout_s: float, together: bool
    ) -> tuple[dict[int, int], list[int]]:
        """Numbers of groups that env runners can hand over, and lost env runners; arguments as in :meth:`take_groups`."""
        deadline, counts = time.monotonic() + timeout_s, Counter[int]()
        while True:
            number = self._await_groups({*runner_ids}, together)
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(self._waits), num_returns=1, timeout=left) if self._waits else ([], [])
            if not ready:
                return {}, []
            ready, _ = ray.wait(list(self._waits), num_returns=len(self._waits), timeout=0)
            found, dead = self._answers({call: self._waits.pop(call) for call in ready}, TAKE_TIMEOUT_S, LATE)
            ended = {runner_id: count for runner_id, count in found.items() if count >= max(1, number[runner_id])}
            if ended or dead:
                return ended, dead
            if any(count > counts[runner_id] for runner_id, count in found.items()):
                deadline = time.monotonic() + timeout_s
            counts |= Counter(found)

    def _await_groups(self, runner_ids: set[int], together: bool) -> Counter[int]:
        """Let these env runners wait; return how many groups of each must have ended before it hands them over, 0 for any."""
        number = Counter(self._unfinished.values()) if together else Counter[int]()
        for runner_id in runner_ids - {*self._waits.values()}:
            least = max(1, number[runner_id])
            self._waits[self._actor(runner_id).wait_for_groups.remote(WAIT_SECONDS, least)] = runner_id
        return number

    def _take_local(
        self, local: TextEnvRunner, iteration: int | None, timeout_s: float, together: bool
    ) -> list[GroupSample]:
        number, count, deadline = len(self._unfinished) if together else 1, 0, time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and count < number:
            # In between, signals are handled.
            if (found := local.wait_for_groups(min(left, WAIT_SECONDS), number)) > count:
                count, deadline = found, time.monotonic() + timeout_s
        samples, *groups = local.take_groups(iteration, count)
        return [_with_group(sample, ray.put(group), iteration) for sample, group in zip(samples, groups, strict=True)]

    def _answers(
        self, calls: Mapping[ObjectRef[Answer], int], timeout_s: float, late_because: str
    ) -> tuple[dict[int, Answer], list[int]]:
        """Results by env-runner id, and the ids of env runners that died, were restarted, or are replaced because they are late."""
        answers: dict[int, Answer] = {}
        lost = []
        ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        for call in late:
            self._replace(calls[call], late_because)
            count_dropped(self._runners)
            lost.append(calls[call])
        for call in ready:
            try:
                answers[calls[call]] = ray.get(call)
            except RayTaskError as error:
                if not isinstance(root_cause(error), NotConnectedError):
                    raise
                self._lose(calls[call], "was restarted")
                lost.append(calls[call])
            except RayError as error:
                self._lose(calls[call], f"died: {error}")
                lost.append(calls[call])
        return answers, lost

    def abandon_late(self) -> list[int]:
        """Replace every env runner that has unfinished groups, without waiting; return their ids, all of whose groups are lost."""
        late = [*{*self._unfinished.values()}]
        if self._local() is not None:
            self.abandon_groups()
            return late
        for runner_id in late:
            self._replace(runner_id, f"completed no group within sample_timeout_s={self._config.sample_timeout_s:g} s")
        self._unfinished = {}
        return late

    def abandon_groups(self) -> None:
        """Cancel all unfinished groups, without waiting."""
        if (local := self._local()) is not None:
            local.abandon_groups()
        for runner_id in {*self._unfinished.values()} - {LOCAL}:
            self._actor(runner_id).abandon_groups.remote()
        # Pending calls refer to cancelled groups: their results are not read.
        self._unfinished, self._waits = {}, {}

    # -- a cluster that changes ----------------------------------------------------------------------------------------

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of engines and env-runner actors in use."""
        return len(self._engines.handles), len(self._runners.healthy_env_runner_ids())

    def grow(self) -> None:
        """Request engines and env runners from Ray up to the maximum, without waiting; :meth:`adapt` adds them."""
        self._engines.grow()
        _, most = actor_range(self._config.num_env_runners)
        self._new_runners.request(most - self._runners.num_remote_env_runners())

    def adapt(self, holding: Collection[int]) -> None:
        """Leave nodes that will be removed, and add engines and env runners that have started; the engines then need weights.

        Args:
            holding: env runners with groups for a later update. They get no further groups, and are replaced when no group
                is left.
        """
        leaving = draining_nodes()
        self._engines.adapt(leaving)
        runner_ids = self._runners.healthy_env_runner_ids()
        self._leaving = {runner_id for runner_id in runner_ids if runs_on(self._actor(runner_id), leaving)}
        for runner_id in self._leaving.difference(holding):
            self._replace(runner_id, "was on a node that is being removed")
        self._add_started()

    def withdraw(self) -> None:
        """Cancel the requests for further env runners."""
        self._new_runners.withdraw()

    def _add_started(self) -> None:
        for runner_id in self._new_runners.add_started():
            self._connect([runner_id])

    # -- faults --------------------------------------------------------------------------------------------------------

    def take_losses(self) -> list[str]:
        """Return the reason for each loss of an env runner since the last call, one line each, the earliest first."""
        losses, self._losses = self._losses, []
        return losses

    def repair(self, again: int) -> None:
        """Replace dead engines and env runners; replacements get the current weights and engines.

        Args:
            again: number of groups of rollouts that are then played again.
        """
        self._engines.faults.played_again += again
        self._engines.probe_and_restart()
        self._connect_to_replacements()
        self._restore()

    def _restore(self) -> None:
        if restored := self.restore_runners():
            self._on_recreated(restored)

    def restore_runners(self) -> list[int]:
        """Connect the env runners that Ray has restarted; return their ids."""
        with self._engines.faults.waiting():
            restored: list[int] = self._runners.probe_unhealthy_env_runners()
        if restored:
            self._connect(restored)
        return restored

    def _connect(self, runner_ids: list[int] | None, reset: bool = False) -> list[int]:
        """Connect the given env runners, or all, to the engines; an env runner that cannot connect is lost.

        Args:
            runner_ids: the env runners; ``None``: all.
            reset: whether they still have the config of an earlier trial.

        Returns:
            Ids of the env runners that had no engines: they are new, or Ray has restarted them.
        """
        config, handles = self._config, self._engines.handles
        kept = self._kept

        def connect(runner: TextEnvRunner) -> int | None:
            is_new = not runner.is_connected
            if reset or (kept and is_new):  # Ray restarts an env runner with the config that it was created with
                runner.reset(config)
            runner.connect(handles)
            return runner.worker_index if is_new else None

        if runner_ids is None:
            self._connected = handles
        new = self._runners.foreach_env_runner(
            connect,
            remote_worker_ids=runner_ids,
            local_env_runner=runner_ids is None,
            timeout_seconds=config.engine_start_timeout_s,
        )
        return [runner_id for runner_id in new if runner_id is not None]

    def _local(self) -> TextEnvRunner | None:
        """The env runner in this process, if the config has no remote env runners."""
        local: TextEnvRunner | None = self._runners.local_env_runner
        return None if self._runners.num_remote_env_runners() else local

    def _await_runners(self) -> list[int]:
        """Ids of the remote env runners that can play; waits for Ray to restart one if all have died.

        Raises:
            InfrastructureError: none was restarted within :data:`RESTART_TIMEOUT_S` seconds, or restarts are disabled; or an engine
                could not be replaced.
        """
        self._engines.restore()
        self._connect_to_replacements()
        if self._local() is not None:
            return []
        timeout_s = RESTART_TIMEOUT_S if self._config.restart_failed_env_runners else 0.0
        deadline = time.monotonic() + timeout_s
        runner_ids: list[int] = self._runners.healthy_env_runner_ids()
        while not runner_ids:
            if time.monotonic() >= deadline:
                waited = (
                    f"none was restarted within {timeout_s:.0f} s" if timeout_s else "restart_failed_env_runners is off"
                )
                raise InfrastructureError(
                    f"No env runner is left, and {waited}. The last failures: "
                    f"{'; '.join(self._losses[-2:]) or 'see the logs of Ray'}. "
                    "Resume from the last checkpoint."
                )
            time.sleep(0.5)
            self._add_started()
            self._restore()
            runner_ids = self._runners.healthy_env_runner_ids()
        return runner_ids

    def _connect_to_replacements(self) -> None:
        """Connect the env runners to the engines if these have changed since the last connection."""
        if self._connected != self._engines.handles and (restarted := self._connect(None)):
            self._on_recreated(restarted)

    def _replace(self, runner_id: int, reason: str) -> None:
        """End an env runner that hangs; Ray starts another one in its place."""
        self._lose(runner_id, reason)
        self._waits = {call: other for call, other in self._waits.items() if other != runner_id}
        ray.kill(self._actor(runner_id), no_restart=False)

    def _lose(self, runner_id: int, reason: str) -> None:
        logger.warning("env runner %d %s", runner_id, reason)
        self._losses.append(f"env runner {runner_id} {reason}".splitlines()[0])
        self._engines.faults.note(self._losses[-1])
        self._engines.abort(actor_id(self._actor(runner_id)))
        mark_lost(self._runners, runner_id)

    def _actor(self, runner_id: int) -> ActorHandle[TextEnvRunner]:
        return env_runner_actors(self._runners)[runner_id]


def _with_group(sample: GroupSample, group: ObjectRef[Any], iteration: int | None) -> GroupSample:
    """Add the reference to a sample's group, if the group is trained on."""
    return replace(sample, group=group if iteration is not None and sample.num_survivors else None)
