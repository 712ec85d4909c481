"""TRIAL: each turn's dense hindsight loss is weighed by how much of its trajectory's hindsight gap the turn holds.

The paper's Algorithm 1; L = L_out + clip_b(λ_g · L_dense) with b = α · |L_GRPO| (Eq. 8).
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.algorithms.grpo import GRPO
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TokenBatch, TurnRows, required, step_values
from trial_ray.objectives.agreement import group_agreement
from trial_ray.objectives.allocation import (
    hindsight_gap,
    permuted_weights,
    relative_weights,
    turn_scores,
    uniform_weights,
)
from trial_ray.objectives.losses import dense_hindsight_loss
from trial_ray.objectives.segments import segment_sum, zero_outside
from trial_ray.rollout.episode import derive_seed
from trial_ray.rollout.trajectory import TrajectoryGroup

PROFILES = ("relative", "uniform", "permuted")


class TrajectoryRelative(Method["TRIALConfig"]):
    """The profile is built from π_old's gap and fixed during the update; the gap in the loss follows π_θ.

    log π_T(y|h⁺) was cached by the scoring pass, so hindsight costs no additional training pass.
    """

    name = "trial"
    needs_privileged_view = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Give every turn its weight w_k (Eq. 4 to Eq. 6)."""
        gap = hindsight_gap(required(rows.hindsight_logprobs), rows.logprobs, self.config.gap_clip)
        scores, counts = turn_scores(gap, rows.mask, rows.turn_ids, len(rows))
        rows.scores = scores
        valued = scores * step_values(groups) if self.config.value_weighting else scores
        rows.weights = self.allocate(valued, counts, rows.trajectory_ids, iteration)
        return {
            "turn_score_mean": scores.mean(),
            "gap_mean": gap.mean(),
            "turn_weight_std": rows.weights.std(correction=0),
            **self._agreement(gap, rows, groups),
        }

    def _agreement(self, gap: torch.Tensor, rows: TurnRows, groups: list[TrajectoryGroup]) -> Metrics:
        """Whether the rollouts that earned more have the higher mean gap; nothing where all of a group earned the same."""
        survivors = [(index, each) for index, group in enumerate(groups) for each in group.survivors]
        owners = rows.trajectory_ids[rows.turn_ids]
        tokens = segment_sum(rows.mask.double(), owners, len(survivors))
        means = segment_sum(zero_outside(gap.double(), rows.mask), owners, len(survivors)) / tokens
        returns = torch.tensor([each.outcome_reward(self.config.reward) for _, each in survivors], dtype=torch.float64)
        found = group_agreement(means, returns, torch.tensor([index for index, _ in survivors], dtype=torch.int64))
        return {} if found is None else {"agreement": found.mean, "agreement_error": found.error}

    def allocate(
        self, scores: torch.Tensor, counts: torch.Tensor, trajectory_ids: torch.Tensor, iteration: int
    ) -> torch.Tensor:
        """Turn weights ``[K]`` from turn scores ``[K]``: Eq. 6, or one of the controlled study's profiles."""
        if self.config.profile == "uniform":
            return uniform_weights(scores, counts, trajectory_ids)
        if self.config.profile == "permuted":
            # Seeded by the iteration, so that a resumed run permutes as an uninterrupted one does.
            generator = torch.Generator().manual_seed(derive_seed("permuted", self.config.seed or 0, iteration))
            return permuted_weights(scores, counts, trajectory_ids, generator)
        return relative_weights(scores, counts, trajectory_ids)

    @property
    def clamp(self) -> float:
        """As configured."""
        return self.config.clamp_alpha

    def dense_coefficient(self, iteration: int) -> float:
        """λ: 0 before its first iteration."""
        return self.config.hindsight_coeff if iteration >= self.config.hindsight_start_iteration else 0.0

    def dense_loss(
        self, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor], iteration: int
    ) -> tuple[torch.Tensor, Metrics]:
        """L_dense (Eq. 7) with the gap Δ^θ of the current policy."""
        logprobs = fwd_out["logprobs"]
        gap = hindsight_gap(required(tokens.hindsight_logprobs), logprobs, self.config.gap_clip)
        dense = dense_hindsight_loss(logprobs, gap, required(tokens.weights), tokens.mask)
        return dense, {"dense_loss": dense, "hindsight_coeff": torch.tensor(self.dense_coefficient(iteration))}


class TRIALConfig(GRPOConfig):
    """Trajectory-relative hindsight distillation; the paper's ALFWorld runs start λ in iteration 25 and scale rewards by 10."""

    method_class = TrajectoryRelative

    privileged_view: str | None = setting("outcome")
    hindsight_coeff: float = setting(0.01, "λ, the weight of the dense hindsight loss (Eq. 8)", at_least=0)
    hindsight_start_iteration: int = setting(
        1, "first iteration (from 1) in which λ applies; 25 in the published runs", at_least=1
    )
    clamp_alpha: float = setting(
        1.0, "α, the bound of the dense term relative to the GRPO loss (Eq. 8)", at_least=0, infinite=True
    )
    gap_clip: float = setting(
        2.0, "c, the bound on each token's hindsight log-ratio, in nats (Eq. 4)", above=0, infinite=True
    )
    profile: str = setting(
        "relative",
        'turn weights: ``"relative"`` to the turns\' hindsight log-ratios (the paper), or as controls ``"uniform"`` or '
        '``"permuted"`` (those of other turns of the trajectory)',
        one_of=PROFILES,
    )
    value_weighting: bool = setting(
        False,
        "multiply each turn's score by its value, the discounted success rate of the group's rollouts from its "
        "observation (not in the paper)",
    )

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or TRIAL)

    def schedules(self) -> dict[str, int]:
        """λ's first iteration, unless λ is 0 throughout."""
        return {"hindsight_start_iteration": self.hindsight_start_iteration} if self.hindsight_coeff else {}


class UniformConfig(TRIALConfig):
    """TRIAL's dense loss with every turn weighing one, the controlled study's profile without allocation."""

    profile: str = setting("uniform")


class PermutedConfig(TRIALConfig):
    """TRIAL's turn weights dealt to other turns of the same trajectory, the controlled study's null profile."""

    profile: str = setting("permuted")


class ValueWeightedConfig(TRIALConfig):
    """TRIAL's turn scores times step values before they are normalised (not in the paper)."""

    value_weighting: bool = setting(True)


class TRIAL(GRPO):
    """GRPO's loop under the name of the paper's method; its default config is TRIAL's."""

    config: TRIALConfig

    @classmethod
    def get_default_config(cls) -> TRIALConfig:
        """Default configuration."""
        return TRIALConfig()
