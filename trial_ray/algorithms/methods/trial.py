"""TRIAL: each turn's dense hindsight loss is weighted by the turn's hindsight log-ratio, relative to its trajectory's mean.

The paper's Algorithm 1; L = L_out + clip_b(λ_g · L_dense) with b = α · |L_GRPO| (Eq. 8).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.algorithms.grpo import GRPO
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TokenBatch, TurnRows, required, step_values
from trial_ray.metrics import LEARNER, peek
from trial_ray.objectives.agreement import agreeing_parts, ratio_of_sums
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

logger = logging.getLogger(__name__)

PROFILES = ("relative", "uniform", "permuted")
AGREEMENT_ITERATIONS = 10
"""Number of iterations with groups that are evaluated together, since a single iteration has few groups."""
GATE_PATIENCE = 10
"""Number of iterations with a closed gate until advice is given."""


class TrajectoryRelative(Method["TRIALConfig"]):
    """The turn weights are computed from π_old's hindsight log-ratio and fixed during the update; the log-ratio in the loss
    follows π_θ.

    log π_T(y|h⁺) was cached by the scoring pass, so hindsight needs no additional training pass.
    """

    name = "trial"
    needs_teacher_context = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compute every turn's weight w_k (Eq. 4 to Eq. 6)."""
        gap = hindsight_gap(required(rows.hindsight_logprobs), rows.logprobs, self.config.gap_clip)
        scores, counts = turn_scores(gap, rows.mask, rows.turn_ids, len(rows))
        rows.scores = scores
        valued = scores * step_values(groups) if self.config.value_weighting else scores
        rows.weights = self.allocate(valued, counts, rows.trajectory_ids, iteration)
        return {
            "turn_score_mean": scores.mean(),
            "gap_mean": gap.mean(),
            "turn_weight_std": rows.weights.std(correction=0),
            **self._agreement_metrics(gap, rows, groups, iteration),
        }

    def _agreement_metrics(
        self, gap: torch.Tensor, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int
    ) -> Metrics:
        """Agreement of the dense loss with returns and mean log-ratio over the last iterations, and the gate that depends on both.

        The last turn of a rollout does not count for the agreement: its outcome shows how the rollout ended.
        """
        places = [
            (index, place, earned, place + 1 < len(each.turns))
            for index, group in enumerate(groups)
            for each in group.survivors
            for earned in [each.outcome_reward(self.config.reward)]
            for place in range(len(each.turns))
        ]
        group_ids, positions, returns, counted = torch.tensor(places, dtype=torch.float64).unbind(1)
        gaps = segment_sum(zero_outside(gap.double(), rows.mask), rows.turn_ids, len(rows))
        coefficients = required(rows.weights) * gaps * counted
        agreeing = self._recent("parts", agreeing_parts(coefficients, returns, group_ids.long(), positions.long()))
        tokens = segment_sum(rows.mask.double(), rows.turn_ids, len(rows))
        of_groups = [segment_sum(each, group_ids.long(), len(groups)) for each in (gaps, tokens)]
        mean = self._recent("gaps", torch.stack([each[of_groups[1] > 0] for each in of_groups], 1))
        metrics: Metrics = {}
        for name, found in (("agreement", agreeing), ("recent_gap", mean)):
            if found is not None:
                metrics |= {name: found[0], f"{name}_error": found[1]}
        gate, before = self.config.hindsight_gate, self.state.get("gate", 0)
        if gate is not None and iteration >= self.config.hindsight_start_iteration:
            limits = ((agreeing, gate), (mean, 0.0))
            is_open = any(found is not None and bool(found[0] - found[1] > limit) for found, limit in limits)
            self.state["gate"] = max(before, 0) + 1 if is_open else min(before, 0) - 1
            metrics["gate"] = torch.tensor(self.state["gate"])
        return metrics

    def _recent(self, name: str, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a ratio of sums over the groups of the last iterations, with its error; ``parts`` are the rows of this one."""
        self.state[name] = recent = [*self.state.get(name, ()), parts.tolist()][-AGREEMENT_ITERATIONS:]
        return ratio_of_sums(torch.tensor([each for one in recent for each in one], dtype=torch.float64).view(-1, 2))

    def allocate(
        self, scores: torch.Tensor, counts: torch.Tensor, trajectory_ids: torch.Tensor, iteration: int
    ) -> torch.Tensor:
        """Return turn weights ``[K]`` from turn scores ``[K]``: Eq. 6, or one of the controlled study's profiles."""
        if self.config.profile == "uniform":
            return uniform_weights(scores, counts, trajectory_ids)
        if self.config.profile == "permuted":
            # Seeded by the iteration, so that a resumed run permutes as an uninterrupted one does.
            generator = torch.Generator().manual_seed(derive_seed("permuted", self.config.seed or 0, iteration))
            return permuted_weights(scores, counts, trajectory_ids, generator)
        return relative_weights(scores, counts, trajectory_ids)

    @property
    def clamp(self) -> float:
        """α, as configured."""
        return self.config.clamp_alpha

    def dense_coefficient(self, iteration: int) -> float:
        """Return λ, which is 0 before its first iteration and while the gate is closed."""
        # A run that continues without a gate may have closed it before.
        closed = self.config.hindsight_gate is not None and self.state.get("gate", 0) < 0
        applies = iteration >= self.config.hindsight_start_iteration and not closed
        return self.config.hindsight_coeff if applies else 0.0

    def dense_loss(
        self, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor], iteration: int
    ) -> tuple[torch.Tensor, Metrics]:
        """Return L_dense (Eq. 7) with the hindsight log-ratio Δ^θ of the current policy."""
        logprobs = fwd_out["logprobs"]
        gap = hindsight_gap(required(tokens.hindsight_logprobs), logprobs, self.config.gap_clip)
        dense = dense_hindsight_loss(logprobs, gap, required(tokens.weights), tokens.mask)
        return dense, {"dense_loss": dense, "hindsight_coeff": torch.tensor(self.dense_coefficient(iteration))}


class TRIALConfig(GRPOConfig):
    """Trajectory-relative hindsight distillation; the paper's ALFWorld runs start λ in iteration 25 and scale rewards by 10."""

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
    hindsight_gate: float | None = setting(
        None,
        "λ is 0 unless `trial/agreement` is above it, or `trial/recent_gap` above 0, by the standard error; ``None``: never 0 "
        "for this reason (the paper)",
        within=(0, 1),
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
        """Return λ's first iteration, unless λ is always 0."""
        return {"hindsight_start_iteration": self.hindsight_start_iteration} if self.hindsight_coeff else {}


class UniformConfig(TRIALConfig):
    """TRIAL's dense loss with a weight of 1 for every turn, the controlled study's profile without allocation."""

    profile: str = setting("uniform")


class PermutedConfig(TRIALConfig):
    """TRIAL's turn weights, reassigned to other turns of the same trajectory, the controlled study's null profile."""

    profile: str = setting("permuted")


class ValueWeightedConfig(TRIALConfig):
    """TRIAL with turn scores multiplied by step values before they are normalised (not in the paper)."""

    value_weighting: bool = setting(True)


class GatedConfig(TRIALConfig):
    """TRIAL without the dense loss while hindsight neither confirms the responses nor agrees with returns (not in the paper)."""

    hindsight_gate: float | None = setting(0.6)


class TRIAL(GRPO):
    """GRPO's training loop under the name of the paper's method; the default config is TRIAL's."""

    config: TRIALConfig

    @classmethod
    def get_default_config(cls) -> TRIALConfig:
        """Default configuration."""
        return TRIALConfig()

    def _record_update(self, *arguments: Any) -> None:
        """Also log that the gate has opened, has closed, or stays closed."""
        super()._record_update(*arguments)
        names = ("gate", "agreement", "agreement_error", "recent_gap", "recent_gap_error")
        gate, found, error, mean, mean_error = (peek(self.metrics, f"{LEARNER}trial/{name}") for name in names)
        if gate not in (1, -1, -GATE_PATIENCE):
            return
        measured = (
            "not measured, since no two groups had different returns" if found is None else f"{found:.2f} ± {error:.2f}"
        )
        line = f"hindsight gate {'open' if gate > 0 else 'closed, so λ is 0'}: trial/agreement is {measured}"
        if mean is not None:
            line += f", trial/recent_gap {mean:.3f} ± {mean_error:.3f}"
        if gate == -GATE_PATIENCE:
            line += (
                f" ({GATE_PATIENCE} iterations closed). Hindsight neither confirms the responses nor agrees with returns, so this "
                "run equals GRPO. Try a longer warm start, another teacher_context, or GRPOConfig, which is faster"
            )
        logger.warning("iteration %d: %s", self.iteration + 1, line)
