"""RLlib callbacks that measure and print the behaviour of the policy, in one run with two env runners.

    python tuned_examples/rllib_callbacks.py

or `trial-ray train tuned_examples/rllib_callbacks.py`, which also writes a run folder with the metrics of the callbacks.
Callbacks of episodes and samples run on the env runners, which play many episodes at once; all other callbacks run in the
driver. docs/rllib.md lists all callbacks.
"""

from ray.rllib.callbacks.callbacks import RLlibCallback

from trial_ray import GRPOConfig
from trial_ray.models.folders import ALFWORLD_TINY


class Repetitions(RLlibCallback):
    """Measure how often the policy repeats its previous action."""

    def on_episode_start(self, *, episode, **kwargs):
        episode.custom_data["repeated"] = 0

    def on_episode_step(self, *, episode, **kwargs):
        actions = episode.get_actions()
        episode.custom_data["repeated"] += len(actions) > 1 and actions[-1] == actions[-2]

    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        share = episode.custom_data["repeated"] / max(1, len(episode))
        metrics_logger.log_value("repeated_actions", share, reduce="mean", window=1000)
        metrics_logger.log_value("best_return", episode.get_return(), reduce="max")

    def on_sample_end(self, *, env_runner, samples, metrics_logger, **kwargs):
        metrics_logger.log_value(f"episodes_of_runner_{env_runner.worker_index}", len(samples), reduce="sum")

    def on_train_result(self, *, result, **kwargs):
        sampled = result["env_runners"]
        runners = [sampled[f"episodes_of_runner_{index}"] for index in (1, 2)]
        # The run records entries that a callback adds to the result.
        result["episodes_of_most_used_runner"] = max(runners)
        print(
            f"iteration {result['training_iteration']}: {sampled['num_episodes']} episodes "
            f"({runners[0]} + {runners[1]} of the two env runners), return {sampled['episode_return_mean']:.2f}, "
            f"at best {sampled['best_return']:.0f}; {sampled['repeated_actions']:.0%} of the actions repeat the one before"
        )


def show_evaluation(*, evaluation_metrics, **kwargs):
    """Print the evaluation; this callback is a function instead of a class."""
    sampled = evaluation_metrics["env_runners"]
    print(
        f"  evaluation: {sampled['num_episodes']} episodes, success {sampled['success_rate']:.0%}, "
        f"{sampled['repeated_actions']:.0%} repeat"
    )


GAMES = {"split": "generated", "num_games": 64, "difficulty": "tiny", "max_turns": 8}

config = (
    GRPOConfig()
    .callbacks(Repetitions, on_evaluate_end=show_evaluation)
    .environment("trial/ALFWorld-v0", env_config=GAMES)
    .rl_module(model_path=ALFWORLD_TINY)
    .training(lr=3e-4, group_size=4, tasks_per_iteration=4, minibatch_rows=64, microbatch_rows=64, ref_kl_coeff=0.0)
    .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.25)
    .env_runners(max_prompt_tokens=512, max_response_tokens=16, prompt_style="plain", history_window=1)
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .evaluation(evaluation_split="generated", evaluation_env_config={"generator_seed": 1}, evaluation_num_tasks=8)
    .evaluation(evaluation_interval=1, evaluation_temperature=1.0)
    .debugging(seed=0)
)
stop = {"training_iteration": 2}

if __name__ == "__main__":
    algo = config.build_algo()
    try:
        for _ in range(stop["training_iteration"]):
            algo.train()
    finally:
        algo.stop()
