"""RLlib's callbacks in whole runs with two remote env runners: when they are called, with what, and where they log to."""

import inspect

import numpy as np
import pytest
from cli_fakes import read
from ray.rllib.callbacks.callbacks import RLlibCallback
from tiny_run import ChanceEnv, config_of, train, with_two_runners
from user_env import registered

from trial_ray import GRPO
from trial_ray.errors import CallbackError
from trial_ray.runs.experiment import experiment_file, load_experiment

pytestmark = pytest.mark.e2e


def test_the_driver_calls_each_hook_once_with_rllibs_arguments(algorithm_of, model_path, tmp_path, caplog):
    calls = []

    class Unused(RLlibCallback):  # Nested, so that it travels by value: actors cannot import modules of the tests.
        def on_evaluate_offline_start(self, **kwargs):
            raise AssertionError

    def noting(hook):
        documented = inspect.getfullargspec(getattr(RLlibCallback, hook)).kwonlyargs

        def note(**arguments):
            assert {*arguments} == {*documented}
            # Not the algorithm: the config travels to env runners with what its callbacks hold.
            calls.append(hook)

        return note

    def count(metrics_logger, episode, env_runner, **kwargs):
        for reduce in ("item_series", "sum", "lifetime_sum", "min", "max", "mean"):
            metrics_logger.log_value(reduce, env_runner.worker_index, reduce=reduce)
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

    own = {
        "on_algorithm_init": [], "on_checkpoint_loaded": [], "on_evaluate_start": [begin], "on_evaluate_end": [end],
        "on_train_result": [add],
    }  # fmt: skip
    functions = {hook: [noting(hook), *further] for hook, further in own.items()}
    config = (
        with_two_runners(config_of(model_path))
        .evaluation(evaluation_interval=2)
        .callbacks(callbacks_class=Unused, on_episode_end=count, **functions)
    )
    with registered(ChanceEnv):
        algo = algorithm_of(config)
        assert calls == ["on_algorithm_init"]
        assert algo.engine_pool.handles, "the algorithm is whole by then"
        assert "the callback on_evaluate_offline_start is never called" in caplog.text
        calls.clear()
        results = [algo.train() for _ in range(2)]
        assert calls == ["on_train_result", "on_evaluate_start", "on_evaluate_end", "on_train_result"]
        assert "evaluation" not in results[0]
        evaluated = results[1]["evaluation"]
        played = [each["env_runners"] for each in (*results, evaluated)]
        assert [result["added"] for result in results] == [7, 7]
        assert [len(each["item_series"]) for each in played] == [each["num_episodes"] for each in played] == [6, 6, 2]
        for found in (played[0], played[2]):
            series = found["item_series"]
            for name, function in {"min": min, "max": max, "mean": np.mean, "sum": sum, "lifetime_sum": sum}.items():
                assert found[name] == function(series)
        assert played[2]["last_task"].startswith("task ")
        assert evaluated["begun"] == 3.0
        assert evaluated["added"] == 8
        calls.clear()
        algo.evaluate_sets()
        assert not calls, "an evaluation set that is played by itself is no RLlib evaluation"
        assert len(algo.evaluate()["env_runners"]["item_series"]) == 2

        saved = algo.save_to_path(tmp_path)
        calls.clear()
        algo.restore_from_path(saved)
        algo.load_checkpoint(saved)
        assert calls == ["on_checkpoint_loaded"] * 2


def test_a_callback_that_logs_what_is_logged_already_is_named():
    with pytest.raises(CallbackError, match="env_runners/num_episodes"):
        GRPO._log_callbacks(None, [{"num_episodes": 1}])


@pytest.mark.long
def test_the_example_records_what_its_callbacks_log(ray_session, tmp_path):
    train(tmp_path / "run", load_experiment(experiment_file("rllib_callbacks")).config, 1)
    metrics = read(tmp_path / "run/metrics.jsonl")
    shares = [metrics[f"env_runners/episodes_of_runner_{index}"] for index in (1, 2)]
    assert sum(shares) == metrics["env_runners/num_episodes"] == 16
    assert metrics["episodes_of_most_used_runner"] == max(shares)
    assert metrics["env_runners/best_return"] == metrics["env_runners/episode_return_max"]
