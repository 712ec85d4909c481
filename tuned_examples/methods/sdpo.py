"""SDPO: self-distillation without a reward; the teacher is the policy with a peer's success, or feedback, in its prompt.

L = mean(min(ρ_t, C) · KL(π_θ(·|h) ‖ sg π_T(·|h⁺))) over the tokens of turns with such a context, where ρ_t = sg(π_θ / π_old). With
``divergence="sampled"``, −sg(log π_T(y|h⁺) − log π_θ(y|h)) · log π_θ(y|h) replaces the KL divergence. To train with it:
``--method sdpo``. Source: ``compute_self_distillation_loss``, github.com/lasgroup/SDPO at 0e6d510, and TRL's experimental ``sdpo``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trial_ray.algorithms.methods.opsd import OPSDConfig, SelfDistillation
from trial_ray.config.declare import setting
from trial_ray.learner.method import Metrics, per_token
from trial_ray.learner.rows import TokenBatch, TurnRows, required
from trial_ray.objectives.losses import bounded_ratio
from trial_ray.objectives.segments import masked_mean
from trial_ray.trajectory import TrajectoryGroup


class PeerDistillation(SelfDistillation):
    """Excludes turns without a context from the loss, because their teacher would be the policy itself."""

    name = "sdpo"
    config: SDPOConfig

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Mask the turns without a context, and log the share of turns with one."""
        contexts = [turn.teacher_context for turn in rows.turns]
        shown = torch.tensor([context is None or len(context.ids) > 0 for context in contexts])
        rows.mask = rows.mask & shown[rows.turn_ids]
        return {"context_fraction": shown.double().mean()}

    @per_token
    def dense_loss(self, tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int) -> tuple[Tensor, Metrics]:
        """Return the divergence as a token mean, weighted by the bounded ratio."""
        logprobs = fwd_out["logprobs"]
        ratio = bounded_ratio(logprobs.detach() - tokens.old_logprobs).clamp(max=self.config.distillation_ratio_cap)
        gap = required(tokens.hindsight_logprobs) - logprobs.detach()
        losses = fwd_out["divergence"] if self.divergence else -gap * logprobs
        dense = masked_mean(ratio * losses, tokens.mask)
        return dense, {"dense_loss": dense}


class SDPOConfig(OPSDConfig):
    """SDPO with the reverse KL divergence, as in its published runs with feedback; its other runs use ``jsd_mix=0.5``."""

    method_class = PeerDistillation

    teacher_context: str | None = setting("peer")
    jsd_mix: float = setting(1.0)
    jsd_temperature: float = setting(1.0)
    distillation_ratio_cap: float = setting(2.0, "C, the bound on the ratio to the policy before the update", above=0)


CONFIG = SDPOConfig
