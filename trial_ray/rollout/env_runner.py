"""Env-runner actors, which play many episodes at once to keep the inference engines busy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
import ray
from gymnasium.spaces import Text
from ray import cloudpickle
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.checkpoints import Checkpointable

from trial_ray.adapters.guarded import GuardedEnv, required_keys
from trial_ray.adapters.processes import EnvProcesses, ProcessEnv, ProcessLimits
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.config.run import RunSettings
from trial_ray.engines.client import EngineClient
from trial_ray.engines.link import Engines
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.errors import NotConnectedError, UnsupportedError, refusing
from trial_ray.files import Json
from trial_ray.process import EPISODE, RESPONSE, announce, note_event, peak_memory
from trial_ray.prompts.styles import prompt_writer
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.prompts.writer import PromptWriter
from trial_ray.rollout.callbacks import EpisodeWatch, RewardFunction, RunnerCallbacks
from trial_ray.rollout.episode import EpisodeEnv, EpisodeSlots, PolicyPlayer, derive_seed, play_episode
from trial_ray.rollout.groups import GroupRequest, GroupSample, SampleSettings
from trial_ray.rollout.runner_group import PLAY
from trial_ray.trajectory import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# gym.spaces.Text requires a maximum length, which this package never checks.
_TEXT_SPACES = (Text(max_length=2**31 - 1),) * 2
SPACES = {INPUT_ENV_SPACES: _TEXT_SPACES, INPUT_ENV_SINGLE_SPACES: _TEXT_SPACES, DEFAULT_MODULE_ID: _TEXT_SPACES}
"""Spaces of observations and actions under every key that RLlib reads."""


STOP_TIMEOUT_S = 30.0
"""Maximum seconds to wait for cancelled rollouts to end; only an environment that hangs takes longer."""


@refusing(
    {
        "sample sample_get_state_and_metrics": "groups of rollouts are sampled, by play_group(request, settings)",
        "make_env": "environments are created when rollouts need them",
        "make_module": "an env runner has no model; Algorithm.get_module() returns the learner's",
    }
)
class TextEnvRunner(EnvRunner, Checkpointable):
    """Env runner that plays groups of rollouts; the engines sample the responses.

    An env runner has no model. An episode that waits for a response uses no CPU time. Environments are reused for later
    episodes, so their data stay loaded. Groups are played in the event loop of Ray's concurrency group :data:`PLAY`. All other
    calls of the actor run one after the other in another thread, so an environment that blocks does not delay them.
    """

    config: RunSettings

    def __init__(self, config: RunSettings, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._env_creator = kwargs["env_creator"]
        self._processes = EnvProcesses()
        self._set_up(config)
        announce(config.stall_timeout_s)

    def _set_up(self, config: RunSettings) -> None:
        self.config = config
        self._entries = config.environment_entries()
        self._tokenizer: Any = None
        self._prompts: dict[int, PromptWriter] = {}
        self._client: EngineClient | None = None
        self._free_envs: dict[str, list[EpisodeEnv]] = {}
        self._slots = EpisodeSlots(config.max_episodes_in_flight)
        self._groups: set[asyncio.Task[Any]] = set()
        self._num_recordings = 0
        self._callbacks = RunnerCallbacks(self)
        self._reward = RewardFunction.of(config)
        self._is_watched = bool(self._callbacks) or self._reward is not None

    def reset(self, config: RunSettings) -> None:
        """Reinitialize the env runner with another config; :meth:`connect` must be called afterwards."""
        self.stop()
        self.metrics.reset()
        self._set_up(config)

    # -- sampling --------------------------------------------------------------------------------------------------

    def connect(self, engines: Engines) -> None:
        """Send all further generation requests to ``engines``."""
        if self._client is not None:
            self._client.replace_handles(engines)
        else:
            self._client = EngineClient(
                engines,
                timeout_s=self.config.request_timeout_s,
                owner=ray.get_runtime_context().get_actor_id() or "" if ray.is_initialized() else "",
            )

    @ray.method(concurrency_group=PLAY, num_returns=2)
    async def play_group(
        self, request: GroupRequest, settings: SampleSettings
    ) -> tuple[GroupSample, TrajectoryGroup | None]:
        """Play a group of rollouts; groups with lower indices start earlier.

        If an engine or the environment fails in a rollout, this rollout is kept as ``failed``, and the others continue.

        Args:
            request: the task, and the number of its rollouts.
            settings: settings of the rollouts.

        Returns:
            The group's summary, and the group itself, which is ``None`` in evaluation because it is not trained on. They are
            two Ray objects that the caller owns, so they outlive the env runner.

        Raises:
            NotConnectedError: Ray has restarted this env runner, and :meth:`connect` was not called since.
            Exception: a rollout raised because of an error in this package, a callback or the configuration.
        """
        group = await self._play_rollouts(request, settings)
        self._callbacks.call("on_sample_end", settings.in_evaluation, samples=group.trajectories)
        if self.config.teacher_context is not None and not settings.in_evaluation:
            add_teacher_contexts(group, self.config, self._load_tokenizer())
        if settings.recorded and group.completed:
            self.record(0, group)
        logged = self._callbacks.pop_logged(settings.in_evaluation) if self._callbacks else {}
        sample = replace(GroupSample.from_group(request, group, self.config), logged=logged)
        return sample, None if settings.in_evaluation else group

    async def _play_rollouts(self, request: GroupRequest, settings: SampleSettings) -> TrajectoryGroup:
        client, rollouts = self.client, list[asyncio.Task[Trajectory]]()
        task = asyncio.current_task()
        assert task is not None  # The event loop runs this coroutine in a task.
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)
        try:
            async with self._slots.turn(request.index):
                for rollout in range(request.group_size):
                    await self._slots.free.acquire()
                    name = f"group {request.index} rollout {rollout}"
                    rollouts.append(asyncio.create_task(self._play_rollout(request, rollout, settings), name=name))
                    rollouts[-1].add_done_callback(lambda _: self._slots.free.release())
                    await asyncio.sleep(0)  # Let this rollout start, so engines work while later environments load.
            return TrajectoryGroup(request.task_id, await asyncio.gather(*rollouts))
        finally:
            for unfinished in rollouts:
                unfinished.cancel()
            client.end_group(request)
            await asyncio.gather(*rollouts, return_exceptions=True)

    async def _play_rollout(self, request: GroupRequest, rollout: int, settings: SampleSettings) -> Trajectory:
        began, seed = time.monotonic(), derive_seed(request.seed, rollout)
        env, free = self.pop_env(request.environment, settings.env_configs[request.environment])
        try:
            player = self.player(request, settings, seed if settings.seeded else None)
            watch = self.watch(env, request.environment, settings)
            trajectory = await play_episode(env, request.task_id, player, env_seed=request.seed, seed=seed, watch=watch)
            note_event(EPISODE, began, _task_name(), turns=len(trajectory.turns))
            return trajectory
        finally:
            if env.faulty:
                env.close()
            else:
                free.append(env)

    def record(self, iteration: int, *groups: TrajectoryGroup) -> None:
        """Write groups to the folder of recorded trajectories, in the subfolder of an iteration."""
        from trial_ray.rollout.recording import write_groups

        assert self.config.trajectories_folder is not None  # Callers record groups only if the folder is set.
        writer = f"runner{self.worker_index:03d}-{self._num_recordings:05d}"
        write_groups(self.config.trajectories_folder, iteration, groups, writer)
        self._num_recordings += 1

    def apply(self, func: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function with this env runner. Unlike in RLlib, an exception of the function does not end the process."""
        return func(self, *args, **kwargs)

    def pop_env(self, environment: int, env_config: Json) -> tuple[EpisodeEnv, list[EpisodeEnv]]:
        """Return an unused instance of an environment, and the list of unused instances.

        The caller adds the instance to the list after use, unless the instance is faulty.
        """
        entry = self._entries[environment].with_config(**env_config)
        free = self._free_envs.setdefault(_key(entry), [])
        return free.pop() if free else self._new_env(entry), free

    def _new_env(self, entry: EnvironmentEntry) -> EpisodeEnv:
        """Create an environment, in a separate process if the setting ``environment_processes`` is true.

        If the setting is ``None``, the environment adapter's ``own_process`` applies.
        """
        config, required = self.config, required_keys(entry, self.config.reward)
        setting = config.environment_processes
        if entry.adapter.own_process if setting is None else setting:
            limits = ProcessLimits(config.step_timeout_s, config.environment_memory_gb)
            return ProcessEnv(entry, required, self._processes, limits, self._is_watched)
        return GuardedEnv(entry, required, self._is_watched)

    def player(self, request: GroupRequest, settings: SampleSettings, seed: int | None) -> PolicyPlayer:
        """Return the player of one rollout; in ``timeline.json``, its responses are attributed to the calling asyncio task.

        All generation requests of a group of rollouts prefer the same engine. If ``seed`` is ``None``, responses are sampled
        without a seed.
        """
        track = _task_name()

        async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
            began = time.monotonic()
            response = await self.client.generate(prompt_ids, params, request, preferred=request.index)
            tokens = {"prompt_tokens": len(prompt_ids), "response_tokens": len(response.response_ids)}
            note_event(RESPONSE, began, track, **tokens)
            return response

        prompts, sampling = self._prompt_writer(request.environment), self.config.program_sampling
        return PolicyPlayer(prompts, settings.params, generate, seed, sampling)

    def _prompt_writer(self, environment: int) -> PromptWriter:
        if environment not in self._prompts:
            adapter = self._entries[environment].adapter
            self._prompts[environment] = prompt_writer(self._load_tokenizer(), self.config, adapter)
        return self._prompts[environment]

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            from trial_ray.models.loading import load_tokenizer

            self._tokenizer = load_tokenizer(str(self.config.model_path))
        return self._tokenizer

    @property
    def client(self) -> EngineClient:
        """Client of the engines.

        Raises:
            NotConnectedError: :meth:`connect` was not called in this process.
        """
        if self._client is None:
            raise NotConnectedError(
                f"Env runner {self.worker_index} is not connected to any engine: Ray has restarted its process. The algorithm "
                "connects it when it samples next."
            )
        return self._client

    @property
    def is_connected(self) -> bool:
        """Whether :meth:`connect` was called in this process."""
        return self._client is not None

    def watch(self, env: EpisodeEnv, environment: int, settings: SampleSettings) -> EpisodeWatch | None:
        """Return the object that calls the user's reward function and callbacks; ``None`` without either."""
        if not self._is_watched:
            return None
        config, writer = settings.env_configs[environment], self._prompt_writer(environment)
        return EpisodeWatch(self._callbacks, env, config, settings.in_evaluation, writer.responses, self._reward)

    # -- RLlib's interface of an env runner --------------------------------------------------------------------------

    @property
    def module(self) -> Any:
        """Not supported: an env runner has no model.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("An env runner has no model; Algorithm.get_module() returns the learner's.")

    def get_spaces(self) -> dict[str, Any]:
        """Return :data:`SPACES`."""
        return SPACES

    def assert_healthy(self) -> None:
        """Do nothing: an actor that answers is healthy."""

    def report(self) -> Json:
        """Return this process's peak memory and the numbers of its requests to engines (fields of ``RequestCounts``)."""
        counts = {} if self._client is None else asdict(self._client.counts)
        return {**peak_memory(), **counts}

    def get_metrics(self) -> dict[str, Any]:
        """Return an empty dict: :class:`GroupSample` has the sums over rollouts, and the metrics that callbacks log."""
        return {}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return an empty dict: an env runner has no state to save."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing: an env runner has no state to restore."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the constructor arguments that recreate this runner in RLlib."""
        return (), {"config": self.config, "env_creator": self._env_creator}

    def stop(self) -> None:
        """Cancel all rollouts and close every environment."""
        self._cancel_groups()
        for envs in self._free_envs.values():
            for env in envs:
                env.close()
        self._free_envs.clear()
        self._processes.close()

    def _cancel_groups(self) -> None:
        """Cancel all groups in the event loop that plays them, and wait until they have ended."""

        async def cancel() -> None:
            for group in groups:
                group.cancel()
            await asyncio.wait(groups)

        if groups := {*self._groups}:
            loop = next(iter(groups)).get_loop()
            _, unfinished = concurrent.futures.wait([asyncio.run_coroutine_threadsafe(cancel(), loop)], STOP_TIMEOUT_S)
            if unfinished:
                logger.warning("an environment did not return within %.0f s; its thread is left behind", STOP_TIMEOUT_S)


def _task_name() -> str:
    """Return the name of the current asyncio task, which contains the indices of the group and of the rollout."""
    task = asyncio.current_task()
    return "" if task is None else task.get_name()


def _key(entry: EnvironmentEntry) -> str:
    # Hash the pickle, not repr(): repr() may contain an address or abbreviate an array.
    return hashlib.sha256(cloudpickle.dumps((entry.name, sorted(entry.config.items())))).hexdigest()
