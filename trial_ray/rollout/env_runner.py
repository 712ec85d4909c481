"""Env-runner actors: play many episodes of text environments at once, none waiting for another."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from gymnasium.spaces import Text
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.checkpoints import Checkpointable

from trial_ray.adapters.guarded import GuardedEnv, required_keys
from trial_ray.adapters.processes import EnvProcesses, ProcessEnv, ProcessLimits
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.config.run import RunSettings
from trial_ray.engines.client import EngineClient
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.errors import NotConnectedError, UnsupportedError, refusing
from trial_ray.process import EPISODE, RESPONSE, ProcessEvents, announce, note_event, peak_memory, process_events
from trial_ray.prompts.styles import prompt_writer
from trial_ray.prompts.writer import PromptWriter
from trial_ray.rollout.background_groups import BackgroundGroups
from trial_ray.rollout.callbacks import EpisodeWatch, RunnerCallbacks
from trial_ray.rollout.episode import EpisodeEnv, PolicyPlayer, derive_seed, play_episode
from trial_ray.rollout.groups import GroupRequest, GroupSample, SampleSettings
from trial_ray.rollout.rewards import RewardFunction
from trial_ray.trajectory import Trajectory

Result = TypeVar("Result")


def run_quietly(loop: asyncio.Runner, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a task without a result, and return the coroutine's result.

    ``Runner.run`` restores SIGINT's handler when it ends, and Python then formats the finished task with its result, which
    takes half a second for the trajectories of an iteration.
    """
    results: list[Result] = []

    async def collect() -> None:
        results.append(await coroutine)

    loop.run(collect())
    return results[0]


def outside_loop(call: Callable[[], Result]) -> Result:
    """Call a function that runs coroutines; in a separate thread if this thread runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()


# gym.spaces.Text needs a length although nothing here checks it: text environments define their own spaces.
_TEXT_SPACES = (Text(max_length=2**31 - 1),) * 2
SPACES = {INPUT_ENV_SPACES: _TEXT_SPACES, INPUT_ENV_SINGLE_SPACES: _TEXT_SPACES, DEFAULT_MODULE_ID: _TEXT_SPACES}
"""Spaces of observations and actions under every key that RLlib reads."""


SAMPLED = "groups of rollouts are sampled, by begin_groups(requests, settings) and take_groups(iteration, number)"


@refusing(
    {
        "sample": SAMPLED,
        "sample_get_state_and_metrics": SAMPLED,
        "make_env": "environments are created when rollouts need them",
        "make_module": "an env runner has no model; Algorithm.get_module() returns the learner's",
    }
)
class TextEnvRunner(EnvRunner, Checkpointable):
    """Plays groups of rollouts with the engine pool.

    It has no model. An episode that waits for a response costs nothing. A finished episode passes its environment, with
    loaded games, to the next one. The class has no coroutine methods: a single one would make the whole actor an asyncio
    actor, and an environment that blocks would then block every call of the actor.
    """

    config: RunSettings

    def __init__(self, config: RunSettings, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._env_creator = kwargs["env_creator"]
        self._processes = EnvProcesses()
        self._begin(config)
        announce(config.stall_timeout_s)

    def _begin(self, config: RunSettings) -> None:
        self.config = config
        self._entries = config.environment_entries()
        self._tokenizer: Any = None
        self._prompts: dict[int, PromptWriter] = {}
        self._client: EngineClient | None = None
        self._free_envs: dict[str, list[EpisodeEnv]] = {}
        self._num_batches = 0
        self._in_background: BackgroundGroups | None = None
        self._callbacks = RunnerCallbacks(self)
        self._reward = RewardFunction.of(config)

    def reset(self, config: RunSettings) -> None:
        """Switch to another config, as if created with it; :meth:`connect` must be called afterwards."""
        self.stop()
        self.metrics.reset()
        self._begin(config)

    # -- sampling --------------------------------------------------------------------------------------------------

    def connect(self, engines: Sequence[ActorHandle[Any]]) -> None:
        """Use these engines from now on."""
        if self._client is not None:
            self._client.replace_handles(engines)
        else:
            self._client = EngineClient(
                engines,
                timeout_s=self.config.request_timeout_s,
                owner=ray.get_runtime_context().get_actor_id() or "" if ray.is_initialized() else "",
            )

    def begin_groups(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> None:
        """Add requests to those that are played, in the order of their indices, and return immediately; see :meth:`take_groups`.

        A rollout in which an engine or the environment fails is kept as ``failed``; it never ends other rollouts.

        Raises:
            NotConnectedError: Ray has restarted this env runner.
        """
        self._background().begin(requests, settings)

    def wait_for_groups(self, timeout_s: float, number: int = 1) -> int:
        """Wait until ``number`` groups of :meth:`begin_groups` have ended, at most ``timeout_s`` seconds; return their number.

        Raises:
            NotConnectedError: Ray has restarted this env runner, which has lost its groups.
        """
        return self._background().wait(timeout_s, number)

    def take_groups(self, iteration: int | None, number: int) -> list[Any]:
        """Return groups of :meth:`begin_groups` that have ended, the earliest first.

        Args:
            iteration: training iteration in the recording and in the driver's counts; ``None``: groups of an evaluation set,
                which are not trained on.
            number: number of groups, which have ended, as :meth:`wait_for_groups` returned.

        Returns:
            First a list with the samples of these groups, in the order of their requests, and then as many groups, ``None`` if
                a group is not trained on. In a call with ``num_returns=1 + number`` each is an object of its own, which the
                caller owns.

        Raises:
            NotConnectedError: Ray has restarted this env runner, which has lost its groups.
        """
        keep = iteration is not None
        played = sorted(self._background().take(number), key=lambda ended: ended[0].index)
        if self._callbacks and played:
            rollouts = [rollout for _, group in played for rollout in group.trajectories]
            self._callbacks.call("on_sample_end", not keep, samples=rollouts)
        samples = [GroupSample.from_group(request, group, self.config) for request, group in played]
        if self._callbacks and samples:  # the first tells what callbacks have logged
            samples[0] = replace(samples[0], logged=self._callbacks.take_logged(not keep))
        if iteration is not None and played and self.config.trajectories_folder is not None:
            from trial_ray.rollout.recording import write_groups

            writer = f"runner{self.worker_index:03d}-{self._num_batches:05d}"
            write_groups(self.config.trajectories_folder, iteration, [group for _, group in played], writer)
            self._num_batches += 1
        return [samples, *(group if keep and group.survivors else None for _, group in played)]

    def abandon_groups(self) -> None:
        """Cancel the groups of :meth:`begin_groups` and discard them."""
        if self._in_background is not None:
            self._in_background.close()
            self._in_background = None

    def apply(self, func: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a function with this env runner. If it raises, RLlib's own ``apply`` ends the process with all its rollouts."""
        return func(self, *args, **kwargs)

    def take_env(self, environment: int, env_config: dict[str, Any]) -> tuple[EpisodeEnv, list[EpisodeEnv]]:
        """Return a free instance of one of the run's environments, and the list to return it to unless it failed."""
        entry = self._entries[environment].with_config(**env_config)
        free = self._free_envs.setdefault(_key(entry), [])
        return free.pop() if free else self._new_env(entry), free

    def _new_env(self, entry: EnvironmentEntry) -> EpisodeEnv:
        """Create an instance in this process or in a separate one, according to the setting, else to the environment's adapter."""
        config, required = self.config, required_keys(entry, self.config.reward)
        keep_info = self._is_watched()
        chosen = config.environment_processes
        if entry.adapter.own_process if chosen is None else chosen:
            limits = ProcessLimits(config.step_timeout_s, config.environment_memory_gb)
            return ProcessEnv(entry, required, self._processes, limits, keep_info)
        return GuardedEnv(entry, required, keep_info)

    def player(self, request: GroupRequest, settings: SampleSettings, seed: int | None) -> PolicyPlayer:
        """Return the player of one rollout, for the calling asyncio task; all requests of a group use one engine."""
        track = _task_name()

        async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
            began = time.monotonic()
            response = await self.client.generate(prompt_ids, params, request, preferred=request.index)
            tokens = {"prompt_tokens": len(prompt_ids), "response_tokens": len(response.response_ids)}
            note_event(RESPONSE, began, track, **tokens)
            return response

        return PolicyPlayer(self._prompt_writer(request.environment), settings.params, generate, seed)

    def _prompt_writer(self, environment: int) -> PromptWriter:
        if self._tokenizer is None:
            from trial_ray.models.loading import load_tokenizer

            self._tokenizer = load_tokenizer(str(self.config.model_path))
        if environment not in self._prompts:
            adapter = self._entries[environment].adapter
            self._prompts[environment] = prompt_writer(self._tokenizer, self.config, adapter)
        return self._prompts[environment]

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
        """Return the object that calls the user's reward function and callbacks; ``None`` without reward function and callbacks."""
        if not self._is_watched():
            return None
        config, writer = settings.env_configs[environment], self._prompt_writer(environment)
        return EpisodeWatch(self._callbacks, env, config, settings.in_evaluation, writer.responses, self._reward)

    def _is_watched(self) -> bool:
        return bool(self._callbacks) or self._reward is not None

    def _background(self) -> BackgroundGroups:
        client = self.client
        if self._in_background is None:
            play = partial(_play_rollout, self)
            self._in_background = BackgroundGroups(play, client.end_group, self.config.max_episodes_in_flight)
        return self._in_background

    # -- what RLlib asks of an env runner --------------------------------------------------------------------------

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

    def report(self) -> dict[str, Any]:
        """Return the peak memory of this process and counts of its requests; keys of ``peak_memory`` and ``RequestCounts``."""
        counts = {} if self._client is None else asdict(self._client.counts)
        return {**peak_memory(), **counts}

    def recorded_events(self, since: float, most: int) -> ProcessEvents:
        """Return events of episodes and of the responses that they waited for; arguments as in ``process_events``."""
        return process_events(since, most)

    def get_metrics(self) -> dict[str, Any]:
        """Return an empty dict: counts and metrics logged by callbacks are in :class:`GroupSample`."""
        return {}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return an empty state: an env runner learns nothing."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing: an env runner learns nothing."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the constructor arguments that recreate this runner in RLlib."""
        return (), {"config": self.config, "env_creator": self._env_creator}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return an empty list."""
        return []

    def stop(self) -> None:
        """Cancel all rollouts and close every environment."""
        self.abandon_groups()
        for envs in self._free_envs.values():
            for env in envs:
                env.close()
        self._free_envs.clear()
        self._processes.close()


async def _play_rollout(
    runner: TextEnvRunner, request: GroupRequest, rollout: int, settings: SampleSettings
) -> Trajectory:
    """Play one rollout of a request; a function, because a coroutine method would make the actor another kind of actor."""
    began, seed = time.monotonic(), derive_seed(request.seed, rollout)
    env, free = runner.take_env(request.environment, settings.env_configs[request.environment])
    try:
        player = runner.player(request, settings, seed if settings.seeded else None)
        watch = runner.watch(env, request.environment, settings)
        trajectory = await play_episode(env, request.task_id, player, env_seed=request.seed, seed=seed, watch=watch)
        note_event(EPISODE, began, _task_name(), turns=len(trajectory.turns))
        return trajectory
    finally:
        if env.faulty:
            env.close()
        else:
            free.append(env)


def _task_name() -> str:
    """Name of the coroutine's task, which tells the rollout."""
    task = asyncio.current_task()
    return "" if task is None else task.get_name()


def _key(entry: EnvironmentEntry) -> str:
    # Not of texts: that of an object may name its address, which differs in every call, and that of an array leaves values out.
    return hashlib.sha256(cloudpickle.dumps((entry.name, sorted(entry.config.items())))).hexdigest()
