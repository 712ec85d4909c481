"""An env runner without Ray: groups that it plays while it answers calls, and a user's callbacks with RLlib's arguments."""

import asyncio
import inspect
import re
import threading
from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from faulty_env import TURNS, CountingEnv
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.rllib.callbacks.callbacks import RLlibCallback
from user_env import registered

from trial_ray import GRPOConfig, TRIALConfig
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.errors import CallbackError, EnvironmentFaultError, NotConnectedError
from trial_ray.learner.rows import group_turn_rows
from trial_ray.rollout.callbacks import RUNNER_HOOKS, TextEpisode
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.env_runner_pool import EnvRunnerPool
from trial_ray.rollout.groups import GroupRequest, SampleSettings, failure_of
from trial_ray.rollout.recording import read_trajectories
from trial_ray.trajectory import Trajectory

WAIT_S = 60.0
OLD_API_STACK = {"worker", "base_env", "policies"}
"""Arguments that RLlib's new API stack does not pass either."""


class Client:
    """Answers when the gate is open, after other episodes had their turn; counts what is under way."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.groups, self.started = set(), {}
        self.under_way = self.most_under_way = 0

    def end_group(self, request):
        self.groups.discard(request)

    async def generate(self, prompt_ids, params, request, **preferred):
        self.groups.add(request)
        self.started.setdefault(request.index)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0.001)
            while not self.gate.is_set():
                await asyncio.sleep(0.002)
        finally:
            self.under_way -= 1
        return Response(np.array([10], np.int32), np.zeros(1, np.float32), 1, "stop")


@pytest.fixture
def runner_of(model_path):
    """Return a function that makes an env runner, in this process, of a config and callbacks."""

    def make(config=None, **callbacks):
        config = (config or GRPOConfig()).callbacks(**callbacks)
        config.environment(CountingEnv.ENV_ID, env_config={"split": "train"}).rl_module(model_path=model_path)
        config.env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", max_episodes_in_flight=4)
        runner = TextEnvRunner(config=config, env_creator=None, worker_index=3)
        stack.callback(runner.stop)
        runner._client = Client()
        return runner

    with registered(CountingEnv), ExitStack() as stack:
        yield make


def requests(count, size=2, first=0):
    return [GroupRequest(first + index, "two", size, seed=index) for index in range(count)]


def settings(**env_config):
    return SampleSettings(({"split": "train", **env_config},), SamplingParams(4))


def play(runner, size=2, groups=1, **env_config):
    """The samples of groups, each with the group itself in place of a reference."""

    async def play_all():
        return await asyncio.gather(*start(runner, requests(groups, size), **env_config))

    played = cloudpickle.loads(cloudpickle.dumps(asyncio.run(play_all())))
    return [replace(sample, group=group) for sample, group in played]


def start(runner, requested, **env_config):
    return [asyncio.create_task(runner.play_group(request, settings(**env_config))) for request in requested]


@pytest.fixture
def recorded(runner_of):
    """An env runner, and its calls of all hooks, in their order."""
    calls = []
    noting = {hook: lambda hook=hook, **arguments: calls.append((hook, arguments)) for hook in RUNNER_HOOKS}
    return runner_of(**noting), calls


def test_callbacks_of_whole_episodes_get_rllibs_arguments(recorded):
    runner, calls = recorded
    play(runner, groups=2)
    assert {hook for hook, _ in calls} == {*RUNNER_HOOKS}
    of_episodes = defaultdict(list)
    for hook, arguments in calls:
        documented = inspect.getfullargspec(getattr(RLlibCallback, hook)).kwonlyargs
        assert arguments.keys() == {*documented} - OLD_API_STACK
        assert arguments["env_runner"] is runner
        if "episode" in arguments:
            of_episodes[arguments["episode"].id_].append(hook)
    whole = ["on_episode_created", "on_episode_start", *["on_episode_step"] * TURNS, "on_episode_end"]
    assert list(of_episodes.values()) == [whole] * 4
    assert [hook for hook, _ in calls].index("on_episode_end") > 10, "episodes are played at once"
    assert calls[-1][0] == "on_sample_end"
    created = [arguments for hook, arguments in calls if hook == "on_environment_created"]
    for each in created:
        context = each["env_context"]
        assert (type(each["env"]), dict(context), context.worker_index) == (CountingEnv, {"split": "train"}, 3)
    assert len(created) == 4
    assert {each["env_index"] for _, each in calls if "env_index" in each} == {0, 1, 2, 3}
    calls.clear()
    play(runner, groups=2)
    assert "on_environment_created" not in [hook for hook, _ in calls]


def test_episode_has_rllibs_attributes(runner_of):
    seen = []

    def look(episode, **kwargs):
        seen.append((len(episode), episode.is_done, episode.get_return()))

    runner = runner_of(
        on_episode_start=look, on_episode_step=look, on_sample_end=lambda samples, **kwargs: seen.extend(samples)
    )
    play(runner, size=1)
    *steps, episode = seen
    assert steps == [(0, False, 0), (1, False, 0), (2, False, 0), (3, True, 1)]
    assert (episode.is_terminated, episode.is_truncated, episode.env_steps()) == (True, False, TURNS)
    assert episode.get_actions() == episode.responses == [turn.action for turn in episode.turns]
    assert (episode.get_rewards(-1), episode.get_rewards([0, 2])) == (1.0, [0.0, 1.0])
    assert episode.get_observations() == [f"You count: {number}." for number in range(TURNS + 1)]
    assert [f"count to {TURNS}" == episode.task in prompt for prompt in episode.prompts] == [True] * TURNS


def test_changed_episode_is_counted_and_sent_as_a_trajectory(runner_of):
    """RLlib calls classes before functions, each in the order in which they are given."""

    class First(RLlibCallback):
        def on_episode_created(self, *, episode, **kwargs):
            episode.custom_data["factor"] = 1 + episode.is_reset

        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_data["factor"] += 1

    class Second(RLlibCallback):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_data["factor"] *= 2

    def scale(episode, **kwargs):
        factor = episode.custom_data["factor"]
        episode.turns = [replace(turn, reward=factor * turn.reward) for turn in episode.turns]

    (sample,) = play(runner_of(callbacks_class=[First, Second], on_episode_end=scale))
    assert sample.counts.returns == 2 * 4
    assert [(type(each), each.episode_return) for each in sample.group.trajectories] == [(Trajectory, 4.0)] * 2


@pytest.mark.parametrize("fault", ["reset_raises", "step_raises"])
def test_failed_episode_has_no_end_and_is_among_the_samples(recorded, fault):
    runner, calls = recorded
    play(runner, size=1, fault=fault)
    hooks = [hook for hook, _ in calls]
    assert [hooks.count(f"on_{part}") for part in ("episode_step", "episode_end")] == [fault == "step_raises", 0]
    assert hooks.index("on_sample_end") == len(hooks) - 1
    (episode,) = calls[-1][1]["samples"]
    assert (episode.ended, type(episode)) == ("failed", TextEpisode)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (
            lambda spoil: {"callbacks_class": type("Spoilt", (RLlibCallback,), {"on_environment_created": spoil})},
            "Spoilt.on_environment_created",
        ),
        (lambda spoil: {"on_sample_end": spoil}, "on_sample_end=.*spoil"),
    ],
)
def test_raising_callback_is_named_and_ends_only_its_group(runner_of, given, name):
    broken = [True]

    def spoil(*_, **kwargs):
        if broken:
            raise ZeroDivisionError("no such number")

    runner = runner_of(**given(spoil))
    told = f"The callback {name} raised on env runner 3: ZeroDivisionError: no such number"
    with pytest.raises(CallbackError, match=told) as raised:
        play(runner, groups=2)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    broken.clear()
    assert [sample.num_completed for sample in play(runner, groups=2)] == [2, 2]


# --- a reward function of the user's


def parts_of(episode):
    told = episode.get_infos()
    assert [each["score"] for each in told] == [turn / TURNS for turn in range(TURNS + 1)]
    assert (episode.get_rewards(-1), len(episode.responses)) == (1.0, TURNS)
    parts = {"solved": episode.success, "seed": episode.seed % 1000, "turns": np.float32(len(episode))}
    return parts | {f"part{number}": 0.0 for number in range(3, 32)}


async def parts_from_elsewhere(episode):
    await asyncio.sleep(0)
    return parts_of(episode)


@pytest.mark.parametrize(("function", "process"), [(parts_of, False), (parts_from_elsewhere, True)])
def test_function_reward_is_trained_on_logged_and_recorded(runner_of, tmp_path, function, process):
    config = GRPOConfig().training(reward=function, reward_weights={"solved": 10.0, "turns": 0.0})
    config.env_runners(environment_processes=process).recording(trajectories_folder=str(tmp_path))
    shown = []
    runner = runner_of(config, on_environment_created=lambda env, **kwargs: shown.append(isinstance(env, CountingEnv)))
    (sample,) = play(runner)
    runner.record(1, sample.group)
    assert shown == [not process] * 2
    first, second = (each.seed % 1000 for each in sample.group.trajectories)
    for trajectories in (sample.group.trajectories, read_trajectories(tmp_path)):
        assert [each.function_reward for each in trajectories] == [10.0 + first, 10.0 + second]
    seed, metrics = (first + second) / 2, sample.counts.episode_metrics()
    for name, mean in {"solved": 1.0, "seed": seed, "turns": TURNS, function.__name__: 10.0 + seed}.items():
        assert metrics[f"rewards/{name}_mean"] == mean
    assert not sample.zero_variance, "all succeeded, so that the function alone tells them apart"
    assert bool(group_turn_rows([sample.group], config).advantages[0] > 0) == (first > second)


RELEASED = threading.Event()


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda episode: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda episode: next(iter(())), "RuntimeError: coroutine raised StopIteration"),
        (lambda episode: float("nan"), r"the answer {'faulty': nan} .*expected a dict of at most 32 finite numbers"),
        (lambda episode: {"well": 1.0}, "reward_weights names good; the reward function returned well"),
        (lambda episode: {"good": 1e308, "better": 1e308}, "the weighted sum .*inf"),
        (lambda episode: RELEASED.wait(), r"no answer within 0\.2 s"),
        (lambda episode: asyncio.sleep(1000), r"no answer within 0\.2 s"),
    ],
)
def test_failing_reward_function_fails_its_rollout(runner_of, answer, found):
    def faulty(episode):
        return answer(episode)

    config = GRPOConfig().training(reward=faulty, reward_weights={"good": 10.0}, reward_timeout_s=0.2)
    runner = runner_of(config)
    try:
        (sample,) = play(runner, size=1)
    finally:
        RELEASED.set()
        RELEASED.clear()
    (error,) = sample.errors
    assert re.match(rf"RewardError: reward function faulty, Counting-v0, task 'two': {found}", error)
    assert (sample.num_completed, [len(free) for free in runner._free_envs.values()]) == (0, [1])
    assert isinstance(failure_of("nothing", [sample], []), EnvironmentFaultError), "a restart would not help"


# --- groups that are played at once


async def waiting(runner):
    """Three groups, of which none can end before the gate opens."""
    runner.client.gate.clear()
    groups = start(runner, requests(3))
    async with asyncio.timeout(WAIT_S):
        while runner.client.under_way < 4:
            await asyncio.sleep(0)
    return groups


def test_later_groups_join_and_the_oldest_start_first(runner_of):
    """A group that is cancelled leaves its turn to the next."""
    runner = runner_of()

    async def play_all():
        *groups, cancelled = await waiting(runner)
        groups += start(runner, [*requests(2, first=5), *requests(2, first=3)])
        await asyncio.sleep(0)
        cancelled.cancel()
        runner.client.gate.set()
        return await asyncio.wait_for(asyncio.gather(*groups), WAIT_S)

    samples = [sample for sample, _ in asyncio.run(play_all())]
    assert [sample.request.index for sample in samples] == [0, 1, 5, 6, 3, 4]
    assert [*runner.client.started] == [0, 1, 3, 4, 5, 6]
    assert runner.client.most_under_way == 4, "max_episodes_in_flight holds for all groups together"
    assert {(sample.num_completed, sample.num_rows) for sample in samples} == {(2, 2 * TURNS)}


@pytest.mark.parametrize("stop", [False, True])
def test_cancelled_groups_end_and_free_their_environments(runner_of, stop):
    runner = runner_of()

    async def cancel():
        groups = await waiting(runner)
        if stop:
            await asyncio.to_thread(runner._cancel_groups)
        else:
            for group in groups:
                group.cancel()
            await asyncio.wait(groups)
        assert all(group.cancelled() for group in groups)

    asyncio.run(cancel())
    assert runner.client.under_way == 0
    assert not runner.client.groups, "a rollout of one group still waited for a slot"
    (free,) = runner._free_envs.values()
    assert len(free) == 4
    runner.client.gate.set()
    assert [sample.request.index for sample in play(runner)] == [0]
    assert len(free) == 4


def test_a_restarted_runner_is_not_connected(runner_of):
    runner = runner_of()
    runner._client = None
    with pytest.raises(NotConnectedError):
        play(runner)


def test_only_groups_of_training_are_returned_and_get_teacher_contexts(runner_of):
    runner = runner_of(TRIALConfig())
    (sample,) = play(runner)
    for rollout in sample.group.trajectories:
        for turn in rollout.turns:
            assert turn.teacher_context.insert_at == turn.insert_at
            assert len(turn.teacher_context.ids) > 0
    evaluated = runner.play_group(*requests(1), replace(settings(), in_evaluation=True))
    assert asyncio.run(evaluated)[1] is None


# --- the pool


class Pool(EnvRunnerPool):
    """Has runners 3 to 5, whose groups do not end; ``replaced`` are those that it has replaced."""

    def __init__(self, local=None):
        self._config, self._runners = SimpleNamespace(sample_timeout_s=0.01), MagicMock()
        self._leaving, self.replaced, self.alive, self.local = set(), [], [3, 4, 5], local

    def _await_runners(self):
        return [*self.alive]

    def _local(self):
        return self.local

    def _actor(self, runner_id):
        playing = (SimpleNamespace(future=Future),) * 2
        calls = {"play_group.remote": lambda *_: playing, "record.remote": lambda *groups: (runner_id, *groups)}
        return MagicMock(**calls)

    def _replace(self, runner_id, reason):
        self.replaced.append(runner_id)

    def _lose(self, runner_id, reason):
        self.alive.remove(runner_id)

    def cancel(self, playing):
        if self.local:
            super().cancel(playing)


def test_each_request_goes_to_the_runner_with_the_fewest_groups():
    pool = Pool()
    first = pool.submit(requests(4), settings())
    assert [group.runner for group in first] == [3, 4, 5, 3]
    second = pool.submit(requests(3), settings(), first[1:])
    pool._leaving = {4}
    third = pool.submit(requests(2), settings(), first)
    assert [group.runner for group in second + third] == [3, 4, 5, 5, 3]


def test_late_runners_are_replaced_and_others_record_for_lost_ones(monkeypatch):
    """The late ones end no group of an evaluation in time."""
    written = []

    def get(call, timeout):
        if call[0] == 3:
            raise RayActorError
        written.append(call)

    monkeypatch.setattr("trial_ray.rollout.env_runner_pool.ray.wait", lambda calls, **limits: ([], calls))
    monkeypatch.setattr("trial_ray.rollout.env_runner_pool.ray.get", get)
    pool = Pool()
    assert list(pool.stream_groups(requests(2), settings())) == []
    assert sorted(pool.replaced) == [3, 4]
    pool.alive = [3, 4]
    pool.record(7, [SimpleNamespace(runner=runner_id, group=runner_id) for runner_id in (3, 4, 5)])
    assert written == [(4, 7, 4), (4, 7, 3, 5)]


def test_groups_that_never_end_in_this_process_are_cancelled():
    async def never(request, settings):
        await asyncio.Future()

    pool = Pool(SimpleNamespace(play_group=never))
    playing = pool.submit(requests(2), settings())
    assert pool.wait(playing, 0.01) == ({}, set())
    assert pool.replace_late(playing) == {0}, "the only env runner"
    assert all(group.result.cancelled() for group in playing)
