"""TRIAL: each turn's dense hindsight loss is weighted by the turn's hindsight log-ratio, relative to its trajectory's mean.

This is Algorithm 1 of the TRIAL paper, with the loss L = L_out + clip_b(λ · L_dense), b = α · |L_GRPO| (Eq. 8).
"""

from __future__ import annotations

import logging
import statistics
from typing import Any

import torch
from torch import Tensor

from trial_ray.algorithms.grpo import GRPO, GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics, per_token
from trial_ray.learner.rows import TokenBatch, TurnRows, required
from trial_ray.metrics import LEARNER, peek
from trial_ray.objectives.allocation import (
    hindsight_gap,
    permuted_weights,
    relative_weights,
    turn_scores,
    uniform_weights,
)
from trial_ray.objectives.losses import dense_hindsight_loss
from trial_ray.rollout.episode import derive_seed
from trial_ray.trajectory import TrajectoryGroup

logger = logging.getLogger(__name__)

PROFILES = ("relative", "uniform", "permuted")
ITERATIONS_COMPARED = 4
"""Maximum number of iterations with a hindsight loss, and of iterations without it, whose mean returns are compared."""


class TrajectoryRelative(Method["TRIALConfig"]):
    """Turn weights are computed from the hindsight log-ratio of π_old, once per update; the loss uses the log-ratio of π_θ.

    The scoring pass caches log π_T(y|h⁺), so the hindsight loss needs no additional forward pass during training.
    """

    name = "trial"
    needs_teacher_context = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compute every turn's weight w_k (TRIAL paper, Eq. 4 to Eq. 6)."""
        gap = hindsight_gap(required(rows.hindsight_logprobs), rows.logprobs, self.config.gap_clip)
        scores, counts = turn_scores(gap, rows.mask, rows.turn_ids, len(rows))
        rows.scores = scores
        rows.weights = self.allocate(scores, counts, rows.trajectory_ids, iteration)
        return {
            "turn_score_mean": scores.mean(),
            "gap_mean": gap.mean(),
            "turn_weight_std": rows.weights.std(correction=0),
            **self._compare_returns(groups, iteration),
        }

    def _compare_returns(self, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compare mean returns before and after the hindsight loss has begun, and return metrics of the comparison.

        Rollouts of the first iteration with the loss are from a policy that was trained without the loss, so they count as
        rollouts before it. Rollouts of the next ``max_staleness`` iterations may be from such a policy, too, and are excluded.
        """
        returns = [rollout.outcome_reward(self.config.reward) for group in groups for rollout in group.completed]
        if not (returns and self.config.hindsight_coeff) or self.config.drop_zero_variance_groups:
            # If λ is 0, no iteration has the hindsight loss. If groups were dropped, the mean return of the others is biased.
            return {}
        first = self.config.hindsight_start_iteration
        if not first < iteration <= first + self.config.max_staleness:
            phase = "return_recent" if iteration > first else "return_before"
            self.state[phase] = [*self.state.get(phase, ()), statistics.fmean(returns)][-ITERATIONS_COMPARED:]
        before, recent = (self.state.get(name, []) for name in ("return_before", "return_recent"))
        fallen: int = self.state.get("returns_fallen", 0)
        if not (before and recent):
            return {"returns_fallen": torch.tensor(fallen)}
        means = {"return_before": statistics.fmean(before), "return_recent": statistics.fmean(recent)}
        comparable = len(recent) == ITERATIONS_COMPARED and 2 * len(before) >= ITERATIONS_COMPARED
        if fallen or (comparable and means["return_recent"] < means["return_before"]):
            self.state["returns_fallen"] = fallen = fallen + 1
        return {name: torch.tensor(value) for name, value in {"returns_fallen": fallen, **means}.items()}

    def allocate(self, scores: Tensor, counts: Tensor, trajectory_ids: Tensor, iteration: int) -> Tensor:
        """Return turn weights ``[K]`` from turn scores ``[K]``: TRIAL paper, Eq. 6, or a control experiment's weights."""
        if self.config.profile == "uniform":
            return uniform_weights(scores, counts, trajectory_ids)
        if self.config.profile == "permuted":
            # Derive the seed from the iteration, so a resumed run draws the same permutations as an uninterrupted run.
            generator = torch.Generator().manual_seed(derive_seed("permuted", self.config.seed or 0, iteration))
            return permuted_weights(scores, counts, trajectory_ids, generator)
        return relative_weights(scores, counts, trajectory_ids)

    @property
    def clamp(self) -> float:
        """α of the clamp (TRIAL paper, Eq. 8), the setting ``clamp_alpha``."""
        return self.config.clamp_alpha

    def dense_coefficient(self, iteration: int) -> float:
        """Return λ, the weight of the dense loss, which is 0 before the iteration ``hindsight_start_iteration``."""
        return self.config.hindsight_coeff if iteration >= self.config.hindsight_start_iteration else 0.0

    @per_token
    def dense_loss(self, tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int) -> tuple[Tensor, Metrics]:
        """Return L_dense (TRIAL paper, Eq. 7) with the hindsight log-ratio Δ^θ of the current policy."""
        logprobs = fwd_out["logprobs"]
        gap = hindsight_gap(required(tokens.hindsight_logprobs), logprobs, self.config.gap_clip)
        dense = dense_hindsight_loss(logprobs, gap, required(tokens.weights), tokens.mask)
        return dense, {"dense_loss": dense, "hindsight_coeff": torch.tensor(self.dense_coefficient(iteration))}


class TRIALConfig(GRPOConfig):
    """Trajectory-relative hindsight distillation; the paper's ALFWorld runs start the hindsight loss in iteration 25."""

    method_class = TrajectoryRelative

    teacher_context: str | None = setting("outcome")
    hindsight_coeff: float = setting(0.01, "λ, the weight of the dense hindsight loss (Eq. 8)", at_least=0)
    hindsight_start_iteration: int = setting(1, "first iteration (from 1) with λ; 25 in the published runs", at_least=1)
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

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or TRIAL)

    def schedules(self) -> dict[str, int]:
        """Return the first iteration with the hindsight loss; there is no schedule if the loss has weight 0."""
        return {"hindsight_start_iteration": self.hindsight_start_iteration} if self.hindsight_coeff else {}


class UniformConfig(TRIALConfig):
    """TRIAL's dense loss with weight 1 for every turn: a control experiment for the paper's turn weights."""

    profile: str = setting("uniform")


class PermutedConfig(TRIALConfig):
    """TRIAL's dense loss with turn weights exchanged within a trajectory: a control experiment for the paper's turn weights."""

    profile: str = setting("permuted")


class TRIAL(GRPO):
    """GRPO's training loop with TRIAL's default config, and a warning if returns fall."""

    config: TRIALConfig

    @classmethod
    def get_default_config(cls) -> TRIALConfig:
        """Return the default configuration."""
        return TRIALConfig()

    def _record_update(self, *arguments: Any) -> None:
        """Record the update, and warn once if returns have fallen since the hindsight loss began."""
        super()._record_update(*arguments)
        fallen, before, recent = (
            peek(self.metrics, f"{LEARNER}trial/{name}")
            for name in ("returns_fallen", "return_before", "return_recent")
        )
        if fallen == 1:
            logger.warning(
                "iteration %d: with λ the mean return of the last %d iterations is %.2f, before it was %.2f. Compare with GRPO, "
                "or continue with hindsight_coeff=0 from a checkpoint before iteration %d, if one is kept",
                self.iteration + 1,
                ITERATIONS_COMPARED,
                recent,
                before,
                self.config.hindsight_start_iteration,
            )
