"""Success of a policy in games of an experiment's evaluation set, played by the learner in this process."""

from __future__ import annotations

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import ConfigError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.local_games import LocalGames
from trial_ray.learner.learner import GRPOLearner
from trial_ray.prompts.styles import prompt_writer


class EvaluationGames:
    """Games of the evaluation set of a config's first environment.

    Args:
        config: config with the environment, prompts, limits and evaluation set; its learners are in this process.
        number: number of games.

    Raises:
        ConfigError: there is no evaluation set, or the learners are other processes.
    """

    def __init__(self, config: GRPOConfig, number: int) -> None:
        if config.num_learners:
            raise ConfigError(
                f"games={number} are played by the learner in this process, but num_learners is {config.num_learners}. Set games=0 "
                "and evaluate the model afterwards, or set num_learners=0."
            )
        if not (entries := config.evaluation_entries()):
            raise ConfigError(
                f"games={number} needs .evaluation(evaluation_split=...) in the experiment, or set games=0."
            )
        self._config, self._entry = config, entries[0]
        self._tasks = EvaluationSet.from_entry(self._entry, number, config.evaluation_seed).task_ids

    def success_rate(self, learner: GRPOLearner) -> float:
        """Return the share of the games that the learner's policy wins."""
        config, module = self._config, learner.policy_module
        params = SamplingParams(config.max_response_tokens, config.evaluation_temperature, config.evaluation_top_p)
        writer = prompt_writer(module.tokenizer, config, self._entry.adapter)
        with LocalGames(self._entry, self._tasks, params, config.evaluation_seed) as games:
            trajectories = games.play(module.lm, module.tokenizer, writer)
        return sum(trajectory.success for trajectory in trajectories) / len(trajectories)
