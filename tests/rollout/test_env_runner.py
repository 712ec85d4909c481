"""An env runner without Ray: groups that it plays while it answers calls, and a user's callbacks with RLlib's arguments."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from faulty_env import TURNS, CountingEnv
from ray import cloudpickle
from ray.rllib.callbacks.callbacks import RLlibCallback
from user_env import registered

from trial_ray.algorithms.grpo import GRPOConfig
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

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.groups: set[GroupRequest] = set()
        self.started: list[int] = []
        self.under_way = self.most_under_way = 0

    def end_group(self, request):
        self.groups.discard(request)

    async def generate(self, prompt_ids, params, request, **preferred):
        self.groups.add(request)
        if request.index not in self.started:
            self.started.append(request.index)
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
    """Makes an env runner, in this process, of a config that a test has given callbacks."""
    made = []

    def make(config: GRPOConfig) -> TextEnvRunner:
        config.environment(CountingEnv.ENV_ID, env_config={"split": "train"}).rl_module(model_path=model_path)
        config.env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", max_episodes_in_flight=4)
        made.append(TextEnvRunner(config=config, env_creator=None, worker_index=3))
        made[-1]._client = Client()
        return made[-1]

    with registered(CountingEnv):
        yield make
        for runner in made:
            runner.stop()


def requests(count: int, size: int = 2, first: int = 0) -> list[GroupRequest]:
    return [GroupRequest(first + index, "two", size, seed=index) for index in range(count)]


def settings(**env_config) -> SampleSettings:
    return SampleSettings(({"split": "train", **env_config},), SamplingParams(4))


def play(runner, size=2, groups=2, **env_config):
    runner.begin_groups(requests(groups, size), settings(**env_config))
    try:
        return taken(runner, groups)
    finally:
        runner.abandon_groups()


def taken(runner, count: int) -> list:
    """The samples of groups that have ended, with the groups themselves in place of references."""
    assert runner.wait_for_groups(WAIT_S, count) == count
    samples, *groups = runner.take_groups(1, count)
    groups = cloudpickle.loads(cloudpickle.dumps(groups))
    return [replace(sample, group=group) for sample, group in zip(samples, groups, strict=True)]


class Recorder(RLlibCallback):
    """Notes every call, in the order in which they come."""

    def __init__(self):
        self.calls = []

    def note(self, hook, arguments):
        self.calls.append((hook, arguments))


for _hook in RUNNER_HOOKS:
    setattr(Recorder, _hook, lambda self, _hook=_hook, **arguments: self.note(_hook, arguments))


@pytest.fixture
def recorded(runner_of):
    """An env runner, and what is called on it."""
    recorder = Recorder()
    return runner_of(GRPOConfig().callbacks(lambda: recorder)), recorder.calls


def test_every_episode_is_told_from_its_creation_to_its_end_with_rllibs_arguments_and_every_environment_once(recorded):
    runner, calls = recorded
    play(runner)
    assert {hook for hook, _ in calls} == {*RUNNER_HOOKS}
    for hook, arguments in calls:
        parameters = inspect.signature(getattr(RLlibCallback, hook)).parameters.values()
        documented = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        assert arguments.keys() == documented - OLD_API_STACK
        assert arguments["env_runner"] is runner
    of_episodes = defaultdict(list)
    for hook, arguments in calls:
        if "episode" in arguments:
            of_episodes[arguments["episode"].id_].append(hook)
    whole = ["on_episode_created", "on_episode_start", *["on_episode_step"] * TURNS, "on_episode_end"]
    assert list(of_episodes.values()) == [whole] * 4
    assert [hook for hook, _ in calls].index("on_episode_end") > 10, "episodes are played at once"
    assert calls[-1][0] == "on_sample_end"
    created = [arguments for hook, arguments in calls if hook == "on_environment_created"]
    assert all(isinstance(each["env"], CountingEnv) for each in created)
    assert [(dict(each["env_context"]), each["env_context"].worker_index) for each in created] == [
        ({"split": "train"}, 3)
    ] * 4
    assert {each["env_index"] for _, each in calls if "env_index" in each} == {0, 1, 2, 3}
    calls.clear()
    play(runner)
    assert Counter(hook for hook, _ in calls)["on_environment_created"] == 0


def test_the_episode_tells_task_turns_texts_and_return_under_rllibs_names(runner_of):
    seen = []

    def look(episode, **kwargs):
        seen.append((len(episode), episode.is_done, episode.get_return(), episode.get_observations()))

    def end(episode, **kwargs):
        assert (episode.task_id, episode.success, episode.ended) == ("two", True, "terminated")
        assert (episode.is_terminated, episode.is_truncated, episode.env_steps()) == (True, False, TURNS)
        assert episode.get_actions() == episode.responses == [turn.action for turn in episode.turns]
        assert (episode.get_rewards(-1), episode.get_rewards([0, 2])) == (1.0, [0.0, 1.0])
        assert [episode.task in prompt for prompt in episode.prompts] == [bool(episode.task)] * TURNS

    runner = runner_of(GRPOConfig().callbacks(on_episode_start=look, on_episode_step=look, on_episode_end=[look, end]))
    play(runner, size=1, groups=1)
    assert [turns for turns, *_ in seen] == [0, 1, 2, 3, 3]
    assert [(done, gained) for _, done, gained, _ in seen] == [(False, 0)] * 3 + [(True, 1)] * 2
    assert seen[-1][3] == [f"You count: {number}." for number in range(TURNS + 1)]


def test_classes_and_functions_are_called_in_rllibs_order_and_an_episode_keeps_what_callbacks_put_into_it(runner_of):
    class First(RLlibCallback):
        def on_episode_created(self, *, episode, **kwargs):
            episode.custom_data["told"] = [episode.is_reset]

        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_data["told"].append("first")

    class Second(RLlibCallback):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_data["told"].append("second")

    found = []
    config = GRPOConfig().callbacks(
        [First, Second],
        on_episode_end=lambda episode, **kwargs: episode.custom_data["told"].append("function"),
        on_sample_end=lambda samples, **kwargs: found.extend(each.custom_data["told"] for each in samples),
    )
    play(runner_of(config))
    assert found == [[False, "first", "second", "function"]] * 4


def test_what_a_callback_changes_is_trained_on_and_travels_as_a_trajectory(runner_of):
    def double(episode, **kwargs):
        episode.turns = [replace(turn, reward=2 * turn.reward) for turn in episode.turns]

    (sample,) = play(runner_of(GRPOConfig().callbacks(on_episode_end=double)), groups=1)
    assert sample.counts.returns == 2 * 2
    part = sample.group.trajectories
    assert [type(each) for each in part] == [Trajectory] * 2
    assert [each.episode_return for each in part] == [2.0] * 2


@pytest.mark.parametrize("fault", ["reset_raises", "step_raises"])
def test_a_failed_episode_has_no_end_and_is_among_the_samples(recorded, fault):
    runner, calls = recorded
    play(runner, size=1, groups=1, fault=fault)
    counts = Counter(hook for hook, _ in calls)
    assert (counts["on_episode_end"], counts["on_sample_end"]) == (0, 1)
    assert counts["on_episode_step"] == (fault == "step_raises")
    (episode,) = calls[-1][1]["samples"]
    assert (episode.ended, isinstance(episode, TextEpisode)) == ("failed", True)


@pytest.mark.parametrize("hook", RUNNER_HOOKS)
def test_a_callback_that_raises_is_named_and_ends_nothing_but_the_call(runner_of, hook):
    broken = [True]

    def spoil(**kwargs):
        if broken:
            raise ZeroDivisionError("no such number")

    class Spoilt(RLlibCallback):
        pass

    setattr(Spoilt, hook, lambda self, **kwargs: spoil(**kwargs))
    runner = runner_of(GRPOConfig().callbacks(Spoilt))
    told = f"The callback Spoilt.{hook} raised on env runner 3: ZeroDivisionError: no such number"
    with pytest.raises(CallbackError, match=told) as raised:
        play(runner)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    broken.clear()
    assert [sample.num_survivors for sample in play(runner)] == [2, 2]
    broken.append(True)
    runner = runner_of(GRPOConfig().callbacks(**{hook: spoil}))
    with pytest.raises(CallbackError, match=f"The callback {hook}=.*spoil raised"):
        play(runner)


# --- a reward function of the user's


def parts_of(episode):
    told = episode.get_infos()
    assert [each["score"] for each in told] == [turn / TURNS for turn in range(TURNS + 1)]
    assert (episode.get_rewards(-1), len(episode.responses)) == (1.0, TURNS)
    return {"solved": episode.success, "seed": episode.seed % 1000, "turns": np.float32(len(episode))}


async def parts_from_elsewhere(episode):
    await asyncio.sleep(0)
    return parts_of(episode)


@pytest.mark.parametrize(
    ("function", "process"),
    [(parts_of, False), (parts_from_elsewhere, True)],
    ids=["here", "asynchronous, with environments in processes of their own"],
)
def test_a_reward_function_sees_the_episode_and_is_trained_on_logged_and_recorded(
    runner_of, tmp_path, function, process
):
    config = GRPOConfig().training(reward=function, reward_weights={"solved": 10.0, "turns": 0.0})
    config.env_runners(environment_processes=process).recording(trajectories_folder=str(tmp_path))
    shown = []
    config.callbacks(on_environment_created=lambda env, **kwargs: shown.append(isinstance(env, CountingEnv)))
    (sample,) = play(runner_of(config), groups=1)
    assert shown == [not process] * 2
    group, seeds = sample.group, [each.seed % 1000 for each in sample.group.trajectories]
    assert [each.function_reward for each in group.trajectories] == [10.0 + seed for seed in seeds]
    named = {"solved": 1.0, "seed": sum(seeds) / 2, "turns": TURNS, function.__name__: 10.0 + sum(seeds) / 2}
    assert (
        sample.counts.episode_metrics().items()
        >= {f"rewards/{name}_mean": each for name, each in named.items()}.items()
    )
    assert not sample.zero_variance, "all succeeded, so that the function alone tells them apart"
    assert bool(group_turn_rows([group], config).advantages[0] > 0) == (seeds[0] > seeds[1])
    assert [each.function_reward for each in read_trajectories(tmp_path)] == [10.0 + seed for seed in seeds]


def test_a_reward_may_have_as_many_parts_as_are_allowed(runner_of):
    config = GRPOConfig().training(reward=lambda episode: {f"part{number}": 1.0 for number in range(32)})
    (sample,) = play(runner_of(config), groups=1)
    assert [each.function_reward for each in sample.group.trajectories] == [32.0, 32.0]


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
def test_a_reward_function_that_fails_fails_its_rollout_by_name_and_leaves_the_environment(runner_of, answer, found):
    def faulty(episode):
        return answer(episode)

    config = GRPOConfig().training(reward=faulty, reward_weights={"good": 10.0}, reward_timeout_s=0.2)
    runner = runner_of(config)
    try:
        (sample,) = play(runner, size=1, groups=1)
    finally:
        RELEASED.set()
        RELEASED.clear()
    (error,) = sample.errors
    assert re.match(rf"RewardError: reward function faulty, Counting-v0, task 'two': {found}", error)
    assert (sample.num_survivors, [len(free) for free in runner._free_envs.values()]) == (0, [1])
    assert isinstance(failure_of("nothing", [sample], []), EnvironmentFaultError), "a restart would not help"


# --- groups that are played while the runner answers calls


def waiting(runner_of):
    """An env runner that plays three groups, none of which can end yet, and its client."""
    runner = runner_of(GRPOConfig())
    client = runner.client
    client.gate.clear()
    runner.begin_groups(requests(3), settings())
    deadline = time.monotonic() + WAIT_S
    while client.under_way < 4:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return runner, client


def test_groups_are_played_while_the_runner_answers_and_new_ones_join_them(runner_of):
    runner, client = waiting(runner_of)
    assert runner.take_groups(1, 0) == [[]]
    runner.begin_groups(requests(1, first=3), settings())
    client.gate.set()
    samples = taken(runner, 4)
    assert sorted(sample.request.index for sample in samples) == [0, 1, 2, 3]
    assert client.most_under_way == 4, "max_episodes_in_flight holds for all groups together"
    assert all((sample.num_survivors, sample.num_rows) == (2, 2 * TURNS) for sample in samples)
    assert [sample.group.task_id for sample in samples] == ["two"] * 4


def test_the_oldest_groups_start_first(runner_of):
    runner, client = waiting(runner_of)
    runner.begin_groups(requests(2, first=5), settings())
    runner.begin_groups(requests(2, first=3), settings())
    client.gate.set()
    taken(runner, 7)
    assert client.started == [0, 1, 2, 3, 4, 5, 6]


def test_a_restarted_runner_says_that_it_has_no_engines(runner_of):
    runner = runner_of(GRPOConfig())
    runner._client = None
    for call in (
        lambda: runner.begin_groups(requests(1), settings()),
        lambda: runner.wait_for_groups(0.0),
        lambda: runner.take_groups(1, 1),
    ):
        with pytest.raises(NotConnectedError):
            call()


def test_abandoned_groups_end_at_once_and_give_their_environments_back(runner_of):
    runner, client = waiting(runner_of)
    runner.abandon_groups()
    assert client.under_way == 0
    assert not client.groups, "one had a rollout that still waited for a slot"
    (free,) = runner._free_envs.values()
    assert len(free) == 4
    client.gate.set()
    assert [sample.request.index for sample in play(runner, groups=1)] == [0]
    assert len(free) == 4


def test_an_error_of_the_runner_itself_reaches_the_next_call(runner_of):
    runner = runner_of(GRPOConfig())

    async def broken(*args, **kwargs):
        raise LookupError("no such thing")

    runner.client.generate = broken
    runner.begin_groups(requests(1), settings())
    with pytest.raises(LookupError, match="no such thing"):
        runner.wait_for_groups(WAIT_S)


def test_runners_that_end_no_group_of_an_evaluation_in_time_are_replaced(monkeypatch):
    workers, replaced = object.__new__(EnvRunnerPool), []
    workers._config = SimpleNamespace(sample_timeout_s=5.0)
    workers._unfinished, workers._waits, workers._logged, workers._leaving = {}, {}, {}, set()
    monkeypatch.setattr(workers, "_await_runners", lambda: [3, 4, 5])
    monkeypatch.setattr(workers, "_local", lambda: None)
    monkeypatch.setattr(workers, "_actor", lambda runner_id: MagicMock())
    monkeypatch.setattr(workers, "_replace", lambda runner_id, reason: replaced.append((runner_id, reason)))
    monkeypatch.setattr("trial_ray.rollout.env_runner_pool.ray.wait", lambda calls, **limits: ([], calls))
    assert list(workers.stream_groups(requests(2), settings())) == []
    assert sorted(replaced) == [(runner_id, "completed no group within sample_timeout_s=5 s") for runner_id in (3, 4)]


def test_groups_that_never_end_in_this_process_are_given_up(monkeypatch):
    local = MagicMock(**{"wait_for_groups.return_value": 0, "take_groups.return_value": [[]]})
    workers = object.__new__(EnvRunnerPool)
    workers._unfinished, workers._waits, workers._logged = {}, {}, {}
    monkeypatch.setattr(workers, "_await_runners", list)
    monkeypatch.setattr(workers, "_local", lambda: local)
    assert workers.begin_groups(requests(2), settings()) == {0: 0, 1: 0}
    assert workers.take_groups({0}, 1, 0.01, together=True) == ([], [])
    assert workers.abandon_late() == [0], "its only env runner"
    local.abandon_groups.assert_called_once()
