"""Loss of a microbatch; weighted means of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trial_ray.config.run import RunSettings
from trial_ray.errors import MethodError
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TokenBatch
from trial_ray.objectives.divergences import k3_divergence
from trial_ray.objectives.losses import bounded_ratio, joint_loss
from trial_ray.objectives.segments import masked_mean

Sums = dict[str, tuple[float, float]]
"""The weighted sum of a metric's values and the sum of their weights, by the metric's name."""
OUTCOME_GRADIENT, DENSE_GRADIENT = "/outcome_gradient_squared", "/dense_gradient_squared"


class WeightedMeans:
    """Accumulates weighted sums of scalars, for their means; values with a weight of 0 are ignored."""

    def __init__(self) -> None:
        self._sums: Sums = {}

    def add(self, values: Metrics, weight: float) -> None:
        """Add one value per metric, of shape (), with this weight."""
        if weight:
            for name, value in values.items():
                total, before = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + weight * value.detach().item(), before + weight

    def pop(self) -> Sums:
        """Return the sums of values and weights so far, and reset them."""
        sums, self._sums = self._sums, {}
        return sums


def means(sums: Iterable[Sums]) -> dict[str, float]:
    """Return each metric's mean, from the sums of several learners.

    The metric ``gradient_ratio``, the root mean square of the dense term's gradient divided by the outcome loss's, replaces the
    metrics ``DENSE_GRADIENT`` and ``OUTCOME_GRADIENT``.
    """
    totals: Sums = {}
    for learner_sums in sums:
        for name, (total, weight) in learner_sums.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + weight
    averages = {name: total / weight for name, (total, weight) in totals.items()}
    for name in [name.removesuffix(DENSE_GRADIENT) for name in averages if name.endswith(DENSE_GRADIENT)]:
        dense, outcome = averages.pop(name + DENSE_GRADIENT), averages.pop(name + OUTCOME_GRADIENT)
        # Without a gradient of the outcome loss, for example if the rollouts of each group have equal returns, there is no ratio.
        averages |= {f"{name}/gradient_ratio": math.sqrt(dense / outcome)} if outcome else {}
    return averages


def microbatch_loss(
    method: Method[RunSettings], tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int
) -> tuple[Tensor, Metrics]:
    """Compute the loss of a microbatch or, if the loss is a mean over tokens, of some of the microbatch's rows.

    The loss is L_out + clip(λ · dense, −b, b) with L_out = L_GRPO + ref_kl_coeff · KL − entropy_coeff · entropy. L_GRPO is the
    method's surrogate, dense its dense term, λ the coefficient of this term, and b = α · |L_GRPO| (TRIAL paper, Eq. 8); without
    a clamp, b is infinite. KL and entropy are means over ``tokens.mask``.

    Returns:
        The loss, shape (), and scalars to log, by prefix and name.

    Raises:
        MethodError: the method returned a value that its interface does not allow.
    """
    config, logprobs = method.config, fwd_out["logprobs"]
    advantages = method.token_advantages(tokens, logprobs.detach(), iteration)
    _require_shape(method, "token_advantages", advantages, logprobs.shape)
    tokens = replace(tokens, advantages=advantages)
    weighted = tokens
    if tokens.importance_weights is not None:
        # An importance weight w is never negative, so replacing Â by w Â multiplies each token's clipped surrogate by w.
        weighted = replace(tokens, advantages=tokens.importance_weights * advantages)
    surrogate = method.surrogate(weighted, logprobs, iteration)
    _require_shape(method, "surrogate", surrogate, torch.Size())
    entropy = masked_mean(fwd_out["entropy"], tokens.mask)
    loss = surrogate - config.entropy_coeff * entropy
    if tokens.reference_logprobs is not None:
        kl = k3_divergence(logprobs, tokens.reference_logprobs, tokens.mask)
        loss = loss + config.ref_kl_coeff * kl
    else:
        # Without a reference policy, log the divergence from the policy before the update.
        kl = k3_divergence(logprobs.detach(), tokens.old_logprobs, tokens.mask)
    ratio = bounded_ratio(method.log_ratios(tokens, logprobs.detach()))
    clipped = ((ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)).to(logprobs.dtype)
    metrics = {
        "grpo/surrogate_loss": surrogate,
        "grpo/entropy": entropy,
        "grpo/clip_fraction": masked_mean(clipped, tokens.mask),
        "grpo/ratio_mean": masked_mean(ratio, tokens.mask),
        "grpo/kl": kl,
    }
    dense, method_metrics = method.dense_loss(tokens, fwd_out, iteration)
    metrics |= {f"{method.name}/{name}": value for name, value in method_metrics.items()}
    if dense is None:
        return loss, metrics
    _require_shape(method, "dense_loss", dense, torch.Size())
    coefficient, alpha = method.dense_coefficient(iteration), method.clamp
    if alpha is None:
        return loss + coefficient * dense, metrics
    total, saturated = joint_loss(loss, surrogate, dense, coefficient, alpha)
    metrics[f"{method.name}/clamp_saturated_fraction"] = saturated.float()
    if coefficient and logprobs.requires_grad:
        outcome, whole = (_logit_gradients(term, logprobs, tokens.mask) for term in (loss, total))
        metrics[method.name + OUTCOME_GRADIENT] = masked_mean(outcome.square(), tokens.mask)
        metrics[method.name + DENSE_GRADIENT] = masked_mean((whole - outcome).square(), tokens.mask)
    return total, metrics


def _logit_gradients(term: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate the norm of the gradient of ``term`` with respect to each token's logits, ``[T]``, times the sum of ``mask``.

    For a token y and the policy π, this gradient is the gradient g with respect to log π(y), times the vector (one-hot of y) − π.
    The norm of this vector is between 1 − π(y) and √2 (1 − π(y)). The lower bound is used, because it needs only log π(y). The
    result has the sign of g.
    """
    (gradient,) = torch.autograd.grad(term, logprobs, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros_like(logprobs)
    return gradient * (1 - logprobs.detach().exp()) * mask.sum()


def _require_shape(method: Method[Any], hook: str, value: object, expected: torch.Size) -> None:
    if not isinstance(value, Tensor) or value.shape != expected:
        described = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise MethodError(
            f"{type(method).__name__}.{hook} must return a tensor of shape {list(expected)}, got {described}. "
            "trial_ray/learner/method.py describes each hook."
        )
