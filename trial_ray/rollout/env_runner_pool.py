"""Pool of a run's env runners: sends groups to them, receives the played groups, and replaces lost env runners."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import EnginePool, runs_on
from trial_ray.errors import InfrastructureError, NotConnectedError, root_cause
from trial_ray.ray_internals import actor_id, draining_nodes
from trial_ray.rllib_internals import count_dropped, env_runner_actors, mark_lost
from trial_ray.rollout.groups import GroupRequest, GroupSample, SampleSettings
from trial_ray.rollout.runner_group import NewRunners

if TYPE_CHECKING:
    from trial_ray.rollout.env_runner import TextEnvRunner

logger = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 180.0
"""Seconds to wait for Ray to restart an env runner if all env runners have died."""
RECORD_TIMEOUT_S = 120.0
"""Maximum seconds that an env runner may take to record the groups of an iteration."""
RECORD_ATTEMPTS = 3
"""Maximum number of attempts to record a group; an attempt fails if the env runner is lost while it writes."""
LOCAL = 0
"""Id of the local env runner, which runs in this process."""


@dataclass(frozen=True, eq=False)
class PlayingGroup:
    """A group of rollouts that an env runner plays.

    Attributes:
        runner: id of the env runner.
        result: future of the :class:`GroupSample`; for the local env runner, a future of the sample and the rollouts.
        sample: reference to the :class:`GroupSample`; ``None`` for the local env runner.
        group: reference to the rollouts; ``None`` for the local env runner and for groups of an evaluation set.
    """

    runner: int
    result: futures.Future[Any]
    sample: ObjectRef[GroupSample] | None = None
    group: ObjectRef[Any] | None = None


class EnvRunnerPool:
    """The env runners of a run, connected to its engines.

    An exception that an env runner raises is an error in this package, a callback or the configuration; the pool raises it
    again. If an env runner dies or does not answer in time, its groups are lost, and can be played again.

    Args:
        config: config of the run, which has the limits and timeouts.
        runners: remote env runners, or a single local one if the config has no remote env runners.
        engines: started engines.
        kept: whether the env runners were started by an earlier Tune trial, with another config.
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
        self._connected: list[ActorHandle[Any]] = []
        self._new_runners = NewRunners(runners)
        self._leaving: set[int] = set()
        self._kept = kept
        self._on_recreated = on_recreated
        self._logged: dict[bool, list[Mapping[str, Any]]] = {}
        self._connect(None, reset=kept)
        if kept:
            self.restore_runners()

    def submit(
        self, requests: Sequence[GroupRequest], settings: SampleSettings, playing: Iterable[PlayingGroup] = ()
    ) -> list[PlayingGroup]:
        """Send each request to the env runner with the fewest unfinished groups, without waiting for results.

        Args:
            requests: groups to play; env runners start groups with lower indices earlier.
            settings: settings of the rollouts.
            playing: unfinished groups of earlier calls.

        Raises:
            InfrastructureError: no env runner is left, and none was restarted within :data:`RESTART_TIMEOUT_S` seconds.
        """
        runner_ids = self._await_runners()
        if (local := self._local()) is not None:
            play: Any = local.play_group  # Ray's types describe a remote method, but this call is local.
            loop = _background_loop()
            return [
                PlayingGroup(LOCAL, asyncio.run_coroutine_threadsafe(play(request, settings), loop))
                for request in requests
            ]
        staying = [runner_id for runner_id in runner_ids if runner_id not in self._leaving] or runner_ids
        unfinished = Counter(group.runner for group in playing)
        groups: list[PlayingGroup] = []
        for request in requests:
            runner_id = min(staying, key=unfinished.__getitem__)
            unfinished[runner_id] += 1
            remote_play: Any = self._actor(runner_id).play_group
            sample, group = remote_play.remote(request, settings)
            groups.append(PlayingGroup(runner_id, sample.future(), sample, None if settings.in_evaluation else group))
        return groups

    def wait(
        self, playing: Collection[PlayingGroup], timeout_s: float
    ) -> tuple[dict[PlayingGroup, GroupSample], set[int]]:
        """Wait until at least one group has ended, or an env runner is lost, at most ``timeout_s`` seconds.

        Args:
            playing: unfinished groups.
            timeout_s: maximum time to wait in seconds; 0 returns at once.

        Returns:
            The samples of the groups that have ended, and the ids of env runners that have died or were restarted. All other
            groups of these env runners are lost.

        Raises:
            RayTaskError: an env runner raised; the error is also an instance of the original exception's class.
        """
        samples: dict[PlayingGroup, GroupSample] = {}
        lost: dict[int, str] = {}
        timeout_s = min(timeout_s, threading.TIMEOUT_MAX)  # Python raises OverflowError for timeouts above TIMEOUT_MAX.
        ended, _ = futures.wait([group.result for group in playing], timeout_s, futures.FIRST_COMPLETED)
        for group in [group for group in playing if group.result in ended]:
            try:
                samples[group] = self._sample(group)
            except RayTaskError as error:
                if not isinstance(root_cause(error), NotConnectedError):
                    raise
                lost[group.runner] = "was restarted"
            except RayError as error:
                lost[group.runner] = f"died: {error}"
        self.cancel(group for group in playing if group.runner in lost and group not in samples)
        for runner_id, reason in lost.items():
            self._lose(runner_id, reason)
        for sample in samples.values():
            if sample.logged:
                self._logged.setdefault(sample.group is None, []).append(sample.logged)
        return samples, {*lost}

    def _sample(self, playing: PlayingGroup) -> GroupSample:
        """Return the summary of a group that has ended, with a reference to the group if it is for training."""
        if playing.runner != LOCAL:
            return replace(playing.result.result(), group=playing.group, runner=playing.runner)
        sample, group = playing.result.result()
        return replace(sample, group=None if group is None else ray.put(group), runner=LOCAL)

    def stream_groups(
        self, requests: Sequence[GroupRequest], settings: SampleSettings
    ) -> Generator[GroupSample, None, None]:
        """Play the requested groups of an evaluation set; yield each group's sample as soon as it has ended, in any order.

        If no group ends within ``sample_timeout_s`` seconds, the env runners that still play are replaced, and their groups
        are not yielded.

        Raises:
            RayTaskError: an env runner raised; the error is also an instance of the original exception's class.
            InfrastructureError: no env runner is left, and none was restarted within :data:`RESTART_TIMEOUT_S` seconds.
        """
        playing = {*self.submit(requests, settings)}
        try:
            while playing:
                samples, lost = self.wait(playing, self._config.sample_timeout_s)
                if not samples and not lost:
                    lost = self.replace_late(playing)
                playing = {group for group in playing if group not in samples and group.runner not in lost}
                yield from samples.values()
        finally:
            self.cancel(playing)

    def cancel(self, playing: Iterable[PlayingGroup]) -> None:
        """Cancel unfinished groups, without waiting."""
        for group in playing:
            if group.sample is None:
                group.result.cancel()
            else:
                ray.cancel(group.sample)
            if group.group is not None:
                group.group.future()  # Read the result when it arrives, because Ray logs errors that are never read.

    def replace_late(self, playing: Collection[PlayingGroup]) -> set[int]:
        """Cancel unfinished groups, and replace the remote env runners that play them.

        Returns:
            The ids of the env runners that played the groups, including :data:`LOCAL`; all their groups are lost.
        """
        late = {group.runner for group in playing}
        self.cancel(playing)
        for runner_id in late - {LOCAL}:
            self._replace(runner_id, f"completed no group within sample_timeout_s={self._config.sample_timeout_s:g} s")
            count_dropped(self._runners)
        return late

    def record(self, iteration: int, samples: Sequence[GroupSample]) -> None:
        """Write groups that have ended to the folder of recorded trajectories, and wait for the env runners that write them.

        Each env runner writes the groups that it has played; a healthy env runner also writes the groups of lost env runners.

        Args:
            iteration: training iteration.
            samples: samples of the groups, none of which may belong to an evaluation set.

        Raises:
            RayTaskError: an env runner could not write.
            InfrastructureError: as in :meth:`submit`.
        """
        if (local := self._local()) is not None:
            groups = [sample.group for sample in samples if sample.group is not None]
            local.record(iteration, *ray.get(groups, timeout=RECORD_TIMEOUT_S))
            return
        unrecorded = list(samples)
        for _ in range(RECORD_ATTEMPTS):
            if unrecorded:
                unrecorded = self._try_to_record(iteration, unrecorded)
        if unrecorded:
            logger.warning("%d groups of iteration %d are not recorded", len(unrecorded), iteration)

    def _try_to_record(self, iteration: int, samples: Sequence[GroupSample]) -> list[GroupSample]:
        """Record groups; return the samples of the groups whose env runners were lost while they wrote."""
        runner_ids = self._await_runners()
        shards: dict[int, list[GroupSample]] = {}
        for sample in samples:
            writer = sample.runner if sample.runner in runner_ids else runner_ids[0]
            shards.setdefault(writer, []).append(sample)
        calls: dict[ObjectRef[None], int] = {
            self._actor(runner_id).record.remote(iteration, *[sample.group for sample in shard]): runner_id
            for runner_id, shard in shards.items()
        }
        ray.wait([*calls], num_returns=len(calls), timeout=RECORD_TIMEOUT_S)
        unrecorded = []
        for call, runner_id in calls.items():
            try:
                ray.get(call, timeout=0)
            except GetTimeoutError:
                self._replace(runner_id, f"did not record its groups within {RECORD_TIMEOUT_S:.0f} s")
                unrecorded += shards[runner_id]
            except RayActorError as error:
                self._lose(runner_id, f"died: {error}")
                unrecorded += shards[runner_id]
            except ObjectLostError as error:
                logger.warning(
                    "%d groups of iteration %d are not recorded: %s", len(shards[runner_id]), iteration, error
                )
        return unrecorded

    def pop_logged(self, in_evaluation: bool) -> list[Mapping[str, Any]]:
        """Return and clear the metrics that callbacks have logged, in the form that ``MetricsLogger.aggregate`` expects."""
        return self._logged.pop(in_evaluation, [])

    # -- cluster changes -----------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Request engines and env runners up to the maximum, without waiting; :meth:`adapt` adds those that have started."""
        self._engines.grow()
        _, maximum = actor_range(self._config.num_env_runners)
        self._new_runners.request(maximum - self._runners.num_remote_env_runners())

    def adapt(self, runners_with_groups: Collection[int]) -> None:
        """Stop using nodes that Ray is draining, and add started engines and env runners.

        The caller must then send weights to the engines.

        Args:
            runners_with_groups: ids of env runners with groups for a later update. Such an env runner on a draining node gets no
                further groups if others can play, and is replaced when a later call no longer contains its id.
        """
        leaving = draining_nodes()
        self._engines.adapt(leaving)
        runner_ids = self._runners.healthy_env_runner_ids()
        self._leaving = {runner_id for runner_id in runner_ids if runs_on(self._actor(runner_id), leaving)}
        for runner_id in self._leaving.difference(runners_with_groups):
            self._replace(runner_id, "was on a node that is being removed")
        self._add_started()

    def withdraw(self) -> None:
        """End the env runners that :meth:`grow` requested and that have not been added yet."""
        self._new_runners.withdraw()

    def _add_started(self) -> None:
        for runner_id in self._new_runners.add_started():
            self._connect([runner_id])

    # -- faults --------------------------------------------------------------------------------------------------------

    def pop_losses(self) -> list[str]:
        """Return and clear the reasons why env runners were lost, one line each, the earliest first."""
        losses, self._losses = self._losses, []
        return losses

    def repair(self, num_groups: int) -> None:
        """Replace lost engines with engines that load the current weights, and connect the env runners that Ray has restarted.

        Args:
            num_groups: number of groups that the caller will play again; it is added to ``FaultLog.played_again``.
        """
        self._engines.faults.played_again += num_groups
        self._engines.probe_and_restart()
        self._connect_to_replacements()
        self._restore()

    def _restore(self) -> None:
        if restored := self.restore_runners():
            self._on_recreated(restored)

    def restore_runners(self) -> list[int]:
        """After Ray has restarted env runners, connect them to the engines; return their ids."""
        with self._engines.faults.waiting():
            restored: list[int] = self._runners.probe_unhealthy_env_runners()
        if restored:
            self._connect(restored)
        return restored

    def _connect(self, runner_ids: list[int] | None, reset: bool = False) -> list[int]:
        """Connect the given env runners, or all, to the engines; RLlib marks an env runner that dies meanwhile as unhealthy.

        Args:
            runner_ids: ids of the env runners, or ``None`` for all.
            reset: whether the env runners still have the config of an earlier trial, and get this trial's config.

        Returns:
            Ids of the env runners that were not connected before: they are new, or Ray has restarted them.
        """
        config, handles = self._config, self._engines.handles
        kept = self._kept

        def connect(runner: TextEnvRunner) -> int | None:
            is_new = not runner.is_connected
            if reset or (kept and is_new):  # Ray restarts an earlier trial's env runner with that trial's config.
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
        """Return the env runner in this process if the config has no remote env runners, else ``None``."""
        local: TextEnvRunner | None = self._runners.local_env_runner
        return None if self._runners.num_remote_env_runners() else local

    def _await_runners(self) -> list[int]:
        """Return the ids of the healthy remote env runners; if all have died, wait until Ray has restarted one.

        Raises:
            InfrastructureError: no env runner was restarted within :data:`RESTART_TIMEOUT_S` seconds, restarts are disabled, or
                an engine could not be replaced.
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
                cause = (
                    f"none was restarted within {timeout_s:.0f} s" if timeout_s else "restart_failed_env_runners is off"
                )
                raise InfrastructureError(
                    f"No env runner is left, and {cause}. The last failures: "
                    f"{'; '.join(self._losses[-2:]) or 'see the logs of Ray'}. "
                    "Resume from the last checkpoint."
                )
            time.sleep(0.5)
            self._add_started()
            self._restore()
            runner_ids = self._runners.healthy_env_runner_ids()
        return runner_ids

    def _connect_to_replacements(self) -> None:
        """Connect the env runners again if the engines have changed since the last connection."""
        if self._connected != self._engines.handles and (restarted := self._connect(None)):
            self._on_recreated(restarted)

    def _replace(self, runner_id: int, reason: str) -> None:
        """End an env runner; Ray starts another one in its place."""
        self._lose(runner_id, reason)
        ray.kill(self._actor(runner_id), no_restart=False)

    def _lose(self, runner_id: int, reason: str) -> None:
        """Mark an env runner as lost, log the reason, and cancel its requests to the engines."""
        logger.warning("env runner %d %s", runner_id, reason)
        self._losses.append(f"env runner {runner_id} {reason}".splitlines()[0])
        self._engines.faults.note(self._losses[-1])
        self._engines.abort(actor_id(self._actor(runner_id)))
        mark_lost(self._runners, runner_id)

    def _actor(self, runner_id: int) -> ActorHandle[TextEnvRunner]:
        return env_runner_actors(self._runners)[runner_id]


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop in which the local env runner plays; it runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="groups", daemon=True).start()
    return loop
