"""Counts of rollouts and their turns: sums, so that those of groups, env runners and calls can be added up exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from ray.rllib.utils.metrics import EPISODE_LEN_MEAN, EPISODE_RETURN_MEAN, NUM_ENV_STEPS_SAMPLED, NUM_EPISODES

from trial_ray.rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Sums over rollouts that were played to their end, and the number of those that failed.

    Attributes:
        episodes: rollouts played to their end.
        failed: rollouts that an engine or the environment failed; no other sum counts them.
        turns: turns taken.
        prompt_tokens: over turns.
        response_tokens: over turns.
        returns: of the undiscounted sums of rewards.
        successes: rollouts that solved their task.
        scores: of the environment's scores.
        truncated: rollouts that a limit on turns or prompt tokens cut.
        invalid_responses: turns whose response had not the required form.
        invalid_actions: turns whose action the environment did not understand.
        cut_responses: turns whose response reached the limit.
        cut_histories: turns whose prompt lost history records.
        cut_observations: turns whose prompt lost a part of the observation as well.
    """

    episodes: int = 0
    failed: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    returns: float = 0.0
    successes: int = 0
    scores: float = 0.0
    truncated: int = 0
    invalid_responses: int = 0
    invalid_actions: int = 0
    cut_responses: int = 0
    cut_histories: int = 0
    cut_observations: int = 0

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory]) -> RolloutCounts:
        """Count rollouts."""
        every = list(trajectories)
        played = [each for each in every if not each.failed]
        turns = [turn for each in played for turn in each.turns]
        return cls(
            episodes=len(played),
            failed=len(every) - len(played),
            turns=len(turns),
            prompt_tokens=sum(len(turn.prompt_ids) for turn in turns),
            response_tokens=sum(len(turn.response_ids) for turn in turns),
            returns=sum(each.episode_return for each in played),
            successes=sum(bool(each.success) for each in played),
            scores=sum(float(each.score) for each in played),
            truncated=sum(each.ended != "terminated" for each in played),
            invalid_responses=sum(not turn.valid for turn in turns),
            invalid_actions=sum(bool(turn.invalid_action) for turn in turns),
            cut_responses=sum(turn.finish_reason == "length" for turn in turns),
            cut_histories=sum(turn.prompt_cut != "none" for turn in turns),
            cut_observations=sum(turn.prompt_cut == "observation" for turn in turns),
        )

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return RolloutCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def episode_metrics(self) -> dict[str, float]:
        """Figures over rollouts, by the names under ``env_runners/``; means are left out where there is no rollout."""
        counts: dict[str, float] = {NUM_EPISODES: self.episodes}
        if not self.episodes:
            return counts
        return counts | {
            "success_rate": self.successes / self.episodes,
            "score_mean": self.scores / self.episodes,
            EPISODE_RETURN_MEAN: self.returns / self.episodes,
            EPISODE_LEN_MEAN: self.turns / self.episodes,
            "truncated_rate": self.truncated / self.episodes,
        }

    def metrics(self) -> dict[str, float]:
        """All figures, by the names under ``env_runners/``; rates are left out where nothing was counted."""
        counts: dict[str, float] = {
            "num_failed_episodes": self.failed,
            NUM_ENV_STEPS_SAMPLED: self.turns,
            "num_prompt_tokens": self.prompt_tokens,
            "num_response_tokens": self.response_tokens,
            **self.episode_metrics(),
        }
        if not self.turns:
            return counts
        return counts | {
            "invalid_response_rate": self.invalid_responses / self.turns,
            "invalid_action_rate": self.invalid_actions / self.turns,
            "cut_response_rate": self.cut_responses / self.turns,
            "cut_history_rate": self.cut_histories / self.turns,
            "cut_observation_rate": self.cut_observations / self.turns,
        }
