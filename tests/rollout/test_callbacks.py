"""A user's callbacks on an env runner: RLlib's hooks with RLlib's arguments, for many episodes at once; no Ray."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from faulty_env import TURNS, CountingEnv
from ray import cloudpickle
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from user_env import registered

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.errors import CallbackError
from trial_ray.rollout.callbacks import RUNNER_HOOKS, TextEpisode
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.groups import GroupRequest, SampleSettings
from trial_ray.rollout.trajectory import Trajectory

OLD_API_STACK = {"worker", "base_env", "policies"}
"""Arguments that RLlib's new API stack does not pass either."""


class Client:
    """Answers every prompt after other episodes had their turn."""

    def end_group(self, request):
        pass

    async def generate(self, prompt_ids, params, request, **preferred):
        await asyncio.sleep(0.001)
        return Response(np.array([10], np.int32), np.zeros(1, np.float32), 1, "stop")


@pytest.fixture
def runner_of(model_path, monkeypatch):
    """Makes an env runner, in this process, of a config that a test has given callbacks."""
    monkeypatch.setattr("trial_ray.rollout.groups.ray.put", lambda value: cloudpickle.loads(cloudpickle.dumps(value)))
    made = []

    def make(config: GRPOConfig, **env_config) -> TextEnvRunner:
        config.environment(CountingEnv.ENV_ID, env_config={"split": "train"}).rl_module(model_path=model_path)
        config.env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", max_episodes_in_flight=4)
        made.append(TextEnvRunner(config=config, env_creator=None, worker_index=3))
        made[-1]._client = Client()
        return made[-1]

    with registered(CountingEnv):
        yield make
        for runner in made:
            runner.stop()


def play(runner, size=2, groups=2, keep=True, **env_config):
    settings = SampleSettings(({"split": "train", **env_config},), SamplingParams(4), 1, keep_trajectories=keep)
    requests = [GroupRequest(index, "two", size, seed=index) for index in range(groups)]
    if not keep:
        return list(runner.stream_groups(requests, settings))
    runner.begin_groups(requests, settings)
    try:
        assert runner.wait_for_groups(60.0, groups) == groups
        return runner.take_groups(1)
    finally:
        runner.abandon_groups()


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


def test_every_episode_is_told_from_its_creation_to_its_end_and_every_environment_once(recorded):
    runner, calls = recorded
    play(runner)
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


@pytest.mark.parametrize("hook", RUNNER_HOOKS)
def test_a_hook_is_given_the_arguments_that_rllib_documents(recorded, hook):
    runner, calls = recorded
    play(runner)
    documented = {
        name
        for name, each in inspect.signature(getattr(RLlibCallback, hook)).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert {frozenset(arguments) for name, arguments in calls if name == hook} == {
        frozenset(documented - OLD_API_STACK)
    }
    assert all(arguments["env_runner"] is runner for _, arguments in calls)


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


@pytest.mark.parametrize("keep", [True, False])
def test_logged_values_go_with_the_groups_those_of_evaluation_apart(runner_of, keep):
    def end(episode, metrics_logger, env_runner, **kwargs):
        assert episode.in_evaluation is not keep
        metrics_logger.log_value("turns", len(episode), reduce="sum")
        assert metrics_logger.peek("turns") > 0

    runner = runner_of(GRPOConfig().callbacks(on_episode_end=end))
    driver = MetricsLogger(root=True)
    for expected in (12, 3):
        samples = play(runner, keep=keep) if expected == 12 else play(runner, 1, 1, keep=keep)
        driver.aggregate([each.logged for each in samples if each.logged], key="env_runners")
        assert driver.compile()["env_runners"] == {"turns": expected}
    assert [sample.logged for sample in play(runner_of(GRPOConfig()))] == [{}, {}], "nothing without callbacks"


def test_what_a_callback_changes_is_trained_on_and_travels_as_a_trajectory(runner_of):
    def double(episode, **kwargs):
        episode.turns = [replace(turn, reward=2 * turn.reward) for turn in episode.turns]

    (sample,) = play(runner_of(GRPOConfig().callbacks(on_episode_end=double)), groups=1)
    assert sample.counts.returns == 2 * 2
    (part,) = sample.refs.parts
    assert [type(each) for each in part] == [Trajectory] * 2
    assert [each.episode_return for each in part] == [2.0] * 2


@pytest.mark.parametrize("fault", ["reset_raises", "step_raises", "creation_raises"])
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


def test_an_environment_in_a_process_of_its_own_is_shown_by_its_stand_in(runner_of):
    config = GRPOConfig().env_runners(environment_processes=True)
    found = []
    runner = runner_of(config.callbacks(on_environment_created=lambda env, **kwargs: found.append(env)))
    (sample,) = play(runner, size=1, groups=1)
    assert sample.num_survivors == 1
    assert [env.name for env in found] == ["Counting-v0"]
