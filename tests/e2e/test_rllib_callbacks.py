"""RLlib's callbacks in whole runs with two remote env runners: when they are called, with what, and where they log to."""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from tiny_run import ChanceEnv, config_of, train
from user_env import registered

from trial_ray.algorithms import GRPO
from trial_ray.errors import CallbackError
from trial_ray.runs.experiment import load_experiment

pytestmark = pytest.mark.e2e

KINDS = ("iteration 1: 16", "iteration 2: 16", "  evaluation: 8")
EXAMPLE = Path(__file__).parents[2] / "tuned_examples" / "rllib_callbacks.py"


@pytest.fixture(autouse=True)
def sent_by_value():
    """Actors cannot import modules of the tests."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def config_with(model_path, **callbacks):
    return (
        config_of(model_path)
        .environment(ChanceEnv.ENV_ID, env_config={"split": "train"})
        .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.1)
        .evaluation(evaluation_split="train", evaluation_num_tasks=2, evaluation_interval=2)
        .callbacks(**callbacks)
    )


def documented(hook):
    parameters = inspect.signature(getattr(RLlibCallback, hook)).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def test_the_driver_calls_each_hook_once_with_rllibs_arguments(algorithm_of, model_path, tmp_path, caplog):
    calls = []

    def noting(hook):
        def note(**arguments):
            assert set(arguments) == documented(hook)
            # Not the algorithm: the config travels to env runners with what its callbacks hold.
            calls.append(hook)

        return note

    def count(metrics_logger, episode, **kwargs):
        metrics_logger.log_value("ended", 1, reduce="sum")
        assert episode.t == len(episode) == 2
        assert episode.get_return() == episode.episode_return
        assert not hasattr(episode, "get_extra_model_outputs")
        metrics_logger.log_value("last_task", episode.task_id, reduce="item")

    def add(result, **kwargs):
        result["added"] = 7

    def begin(metrics_logger, **kwargs):
        metrics_logger.log_value(("evaluation", "begun"), 3.0, window=1)

    def end(evaluation_metrics, **kwargs):
        evaluation_metrics["added"] = 8

    hooks = (
        "on_algorithm_init",
        "on_evaluate_start",
        "on_evaluate_end",
        "on_checkpoint_loaded",
    )
    functions = {hook: [noting(hook)] for hook in hooks}
    functions["on_evaluate_end"].append(end)
    functions["on_evaluate_start"].append(begin)

    class Unused(RLlibCallback):
        def on_evaluate_offline_start(self, **kwargs):
            raise AssertionError

    config = config_with(
        model_path,
        callbacks_class=Unused,
        on_episode_end=count,
        on_train_result=[noting("on_train_result"), add],
        **functions,
    )
    with registered(ChanceEnv):
        algo = algorithm_of(config)
        assert calls == ["on_algorithm_init"]
        assert algo.engine_pool.handles, "the algorithm is whole by then"
        assert "the callback on_evaluate_offline_start is never called: nothing is evaluated offline" in caplog.text
        calls.clear()
        results = [algo.train() for _ in range(3)]
        assert calls == [
            "on_train_result",
            "on_evaluate_start",
            "on_evaluate_end",
            "on_train_result",
            "on_train_result",
        ]
        assert [result["env_runners"]["ended"] for result in results] == [6] * 3
        assert all(result["env_runners"]["last_task"].startswith("task ") for result in results)
        assert [result["env_runners"]["num_episodes"] for result in results] == [6] * 3
        assert ["evaluation" in result for result in results] == [False, True, False]
        evaluated = results[1]["evaluation"]
        assert (evaluated["env_runners"]["ended"], evaluated["env_runners"]["num_episodes"]) == (2, 2)
        assert evaluated["env_runners"]["last_task"].startswith("task ")
        assert (evaluated["begun"], evaluated["added"]) == (3.0, 8)
        assert [result["added"] for result in results] == [7] * 3
        calls.clear()
        algo.evaluate_sets()
        assert not calls, "an evaluation set that is played by itself is no RLlib evaluation"
        assert algo.evaluate()["env_runners"]["ended"] == 2

        algo.save_to_path(str(tmp_path / "saved"))
        calls.clear()
        algo.restore_from_path(str(tmp_path / "saved"))
        algo.load_checkpoint(str(tmp_path / "saved"))
        assert calls == ["on_checkpoint_loaded"] * 2


def test_a_callback_that_logs_what_is_logged_already_is_named():
    with pytest.raises(CallbackError, match="A callback logs env_runners/num_episodes, which is logged already"):
        GRPO._log_callbacks(SimpleNamespace(), [{"num_episodes": 1}])


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize(
    ("reduce", "expected"),
    {"item": 4, "item_series": [1, 2, 3, 4], "sum": 10, "lifetime_sum": 10, "min": 1, "max": 4, "mean": 2.5}.items(),
)
def test_values_of_several_hand_overs_are_reduced_together(reduce, expected, in_evaluation):
    on_runner, driver = MetricsLogger(root=False), MetricsLogger(root=True)
    logged = []
    for values in ((1, 2), (3, 4)):
        for value in values:
            on_runner.log_value("seen", value, reduce=reduce)
        logged.append(on_runner.reduce())
    algo = SimpleNamespace(metrics=driver, _logged_in_evaluation=driver)
    GRPO._log_callbacks(algo, logged, in_evaluation=in_evaluation)
    result = driver.compile() if in_evaluation else driver.compile()["env_runners"]
    assert result["seen"] == expected


@pytest.mark.long
def test_the_example_shows_and_records_what_its_callbacks_log(ray_session, tmp_path, capsys):
    train(tmp_path / "run", "", 2, config=load_experiment(EXAMPLE).config)
    told = [line for line in capsys.readouterr().out.splitlines() if " episodes" in line and line.startswith(KINDS)]
    assert [line.split(":")[0] for line in told] == ["  evaluation", "iteration 1", "  evaluation", "iteration 2"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for metrics in lines:
        shares = Counter({index: metrics[f"env_runners/episodes_of_runner_{index}"] for index in (1, 2)})
        assert shares.total() == metrics["env_runners/num_episodes"] == 16
        assert metrics["episodes_of_most_used_runner"] == max(shares.values())
        assert metrics["env_runners/best_return"] == metrics["env_runners/episode_return_max"]
        assert 0 <= metrics["evaluation/env_runners/repeated_actions"] <= 1
