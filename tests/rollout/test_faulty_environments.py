"""On a real env runner, a fault of the environment is played again, and a bug of the env runner is raised."""

import pytest
from faulty_env import CountingEnv
from faulty_run import tiny_config
from user_env import registered


@pytest.mark.actors
@registered(CountingEnv)
def test_failed_evaluation_episode_is_retried_and_a_bug_is_raised(algorithm_of, model_path, caplog, tmp_path):
    def spoil(runner):
        runner.player = lambda *_: {}["a bug of ours"]

    def restore(runner):
        del runner.player

    orders = {"split": "train", "orders": f"{tmp_path}/orders"}
    config = tiny_config(model_path).environment(CountingEnv.ENV_ID, env_config=orders)
    config.engines(engine_kwargs={"max_model_len": 508})  # as other tests' engines, which are used again
    algo = algorithm_of(config.evaluation(evaluation_split="train", evaluation_num_tasks=2))
    (tmp_path / "orders").write_text("step_raises")
    (result,) = algo.evaluate_sets().values()
    assert [episode.ended for episode in result.episodes] == ["terminated"] * 2
    assert "1 of 2 tasks failed" in caplog.text
    algo.env_runner_group.foreach_env_runner(spoil, local_env_runner=False)
    with pytest.raises(KeyError, match="a bug of ours"):
        algo.train()
    algo.env_runner_group.foreach_env_runner(restore, local_env_runner=False)
