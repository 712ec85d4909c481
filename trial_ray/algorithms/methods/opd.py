"""OPD: on-policy distillation; another model, ``teacher_model``, scores the tokens that the policy has sampled.

L = outcome_coeff · L_GRPO + L_distil. With ``divergence="sampled"``, L_distil = −mean(ratio · c), where ratio = π_θ / π_old and
c = clip(log π_T(y|h) − log π_θ(y|h)) is minus the reverse KL divergence, estimated from a token y that was sampled after the
context h. With ``"jsd"``, L_distil is the full-vocabulary Jensen-Shannon divergence of OPSD. With ``curriculum_iterations`` (TCOD,
arXiv 2604.24005), only the first turns of every rollout are distilled at first, and later turns are added gradually.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trial_ray.algorithms.methods.opsd import OPSDConfig, SelfDistillation
from trial_ray.config.declare import setting
from trial_ray.errors import ConfigError
from trial_ray.learner.method import Metrics, per_token
from trial_ray.learner.rows import TokenBatch, TurnRows, required
from trial_ray.objectives.losses import bounded_ratio
from trial_ray.objectives.segments import masked_mean
from trial_ray.trajectory import TrajectoryGroup


class Distillation(SelfDistillation):
    """Distillation from another model. Without ``teacher_context``, that model scores responses after the policy's own prompts."""

    name = "opd"
    needs_teacher_context = False
    own_advantages = False
    config: OPDConfig

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Exclude turns beyond the curriculum's depth from the distillation, and log the depth."""
        if (depth := self._depth(groups, iteration)) is None:
            return {}
        turns = [index for group in groups for rollout in group.completed for index in range(len(rollout.turns))]
        rows.weights = torch.tensor(turns).lt(depth).double()
        return {"depth": torch.tensor(float(depth))}

    def _depth(self, groups: list[TrajectoryGroup], iteration: int) -> int | None:
        """Return the number of turns of each rollout that are distilled, or ``None`` for all.

        This number grows from 1 to the number of turns of the longest rollout, linearly over ``curriculum_iterations`` iterations.
        """
        if self.config.curriculum_iterations is None:
            return None
        longest = max((len(rollout.turns) for group in groups for rollout in group.completed), default=1)
        return max(1, math.ceil(longest * min(1.0, iteration / self.config.curriculum_iterations)))

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return GRPO's advantage of every token times ``outcome_coeff``."""
        return self.config.outcome_coeff * tokens.advantages

    @per_token
    def dense_loss(self, tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int) -> tuple[Tensor, Metrics]:
        """Return the distillation loss as a token mean."""
        logprobs = fwd_out["logprobs"]
        gap = required(tokens.hindsight_logprobs) - logprobs.detach()
        if self.divergence:
            losses = fwd_out["divergence"]
        else:
            clip = self.config.distillation_clip
            coefficients = gap if clip is None else gap.clamp(-clip, clip)
            losses = -coefficients * bounded_ratio(logprobs - tokens.old_logprobs)
        dense = masked_mean(losses if tokens.weights is None else tokens.weights * losses, tokens.mask)
        return dense, {"dense_loss": dense, "gap_mean": masked_mean(gap, tokens.mask)}


class OPDConfig(OPSDConfig):
    """On-policy distillation from ``teacher_model``, by the reverse KL divergence of sampled tokens."""

    method_class = Distillation

    teacher_context: str | None = setting(None)
    divergence: str = setting("sampled")
    jsd_temperature: float = setting(1.0)
    outcome_coeff: float = setting(0.0, "weight of the GRPO loss; 1: GRPO and distillation", at_least=0)
    distillation_clip: float | None = setting(
        None, "bound on a sampled token's log-ratio of teacher and policy, in nats; ``None``: no bound", above=0
    )
    curriculum_iterations: int | None = setting(
        None,
        "iterations until all turns are distilled: the first turn first, then later ones; ``None``: all turns from the start",
        at_least=1,
    )

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        if self.teacher_model is None:
            raise ConfigError(
                "OPD distils another model into the policy: set teacher_model to its folder or hub name. The method opsd distils "
                "the policy from itself with a teacher context."
            )
