"""Divergences between policies (learner, frozen policy, engine) on sampled tokens, and between whole next-token distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trial_ray.objectives.losses import LOG_RATIO_BOUND, bounded_ratio
from trial_ray.objectives.segments import flat_floats, flat_mask, masked_mean, zero_outside

K3_BOUND = 10.0
"""Largest value of a single token in the mean of :func:`k3_divergence`."""


def k3_divergence(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Token mean of the low-variance KL estimate k3 = min(exp(d) − d − 1, :data:`K3_BOUND`), d = log π_ref − log π_θ.

    The estimate is never negative and, over samples of π_θ, unbiased for KL(π_θ ‖ π_ref) if no token is clamped. A clamped
    token has no gradient.

    Args:
        logprobs: float ``[T]``, log π_θ in nats; the only argument that receives a gradient.
        reference_logprobs: float ``[T]``, log π_ref of the same tokens.
        mask: bool or 0/1 ``[T]``, tokens to average over.

    Returns:
        Shape (), in nats per token; 0, with an autograd graph, if the mask is empty.

    Raises:
        ValueError: wrong shape or dtype, or NaN.
    """
    flat_floats("logprobs", logprobs)
    like = ("logprobs", logprobs)
    reference_logprobs = flat_floats("reference_logprobs", reference_logprobs, like).detach()
    mask = flat_mask("mask", mask, like)
    # This clamp keeps exp and its gradient finite. It does not change k3, which exceeds K3_BOUND for d = ±LOG_RATIO_BOUND.
    difference = zero_outside(reference_logprobs - logprobs, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return masked_mean((difference.exp() - difference - 1).clamp(-K3_BOUND, K3_BOUND), mask)


def engine_divergences(
    logprobs: Tensor, behaviour_logprobs: Tensor, compared: Tensor | None = None
) -> dict[str, Tensor]:
    """Differences between the engine's policy, which sampled the tokens, and the learner's policy before the update.

    Only the ratio r of a token's probabilities is clamped, at e²⁰, so that the results are finite if the inputs are.

    Args:
        logprobs: float ``[T]``, the learner's log π_old of the sampled tokens, in nats.
        behaviour_logprobs: float ``[T]``, the engine's log-probabilities of these tokens.
        compared: bool ``[T]``, tokens that the engine sampled with the learner's weights; all tokens if it is ``None``.

    Returns:
        Scalars of shape (): ``logprob_diff`` and ``logprob_diff_max``, mean and largest absolute difference in nats over the
        tokens of ``compared``, 0 if there are none; ``ratio_mean`` and ``ratio_max`` of r = π_old / π_engine; ``kl``, the mean of
        r − 1 − log r, an unbiased estimate of KL(π_engine ‖ π_old). Results are NaN if an input is NaN.

    Raises:
        ValueError: the shapes differ.
    """
    if logprobs.ndim != 1 or logprobs.shape != behaviour_logprobs.shape:
        raise ValueError(
            f"logprobs and behaviour_logprobs must be flat and of one length; got {list(logprobs.shape)} and "
            f"{list(behaviour_logprobs.shape)}."
        )
    difference = (logprobs - behaviour_logprobs).detach()
    ratio, bounded = bounded_ratio(difference), difference.clamp(max=LOG_RATIO_BOUND)
    distances = difference.abs() if compared is None else difference.abs()[compared]
    distances = distances if len(distances) else distances.new_zeros(1)
    return {
        "logprob_diff": distances.mean(),
        "logprob_diff_max": distances.max(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        # expm1 keeps the digits of small differences, which exp(d) - 1 would lose.
        "kl": (torch.expm1(bounded) - bounded).mean(),
    }


def generalised_jsd(logits: Tensor, teacher_logits: Tensor, mix: float = 0.5, temperature: float = 1.0) -> Tensor:
    """Generalised Jensen-Shannon divergence of each position: β KL(T ‖ M) + (1 − β) KL(S ‖ M), M = β T + (1 − β) S.

    S is the policy's distribution, T the teacher's, both over the whole vocabulary; only S receives a gradient. For β = 0 and β = 1
    the formula is 0; the result is then KL(T ‖ S) or KL(S ‖ T), as in TRL.

    Args:
        logits: float ``[N, V]``, the policy's logits.
        teacher_logits: float ``[N, V]``, the teacher's logits.
        mix: β, in [0, 1].
        temperature: divisor of both models' logits, above 0.

    Returns:
        Float ``[N]`` in nats; for β in (0, 1) at most the entropy of (β, 1 − β).

    Raises:
        ValueError: shapes differ, or a number is out of range.
    """
    if logits.ndim != 2 or logits.shape != teacher_logits.shape:
        raise ValueError(
            f"logits and teacher_logits must both be [N, V]; got {list(logits.shape)} and {list(teacher_logits.shape)}."
        )
    if not 0 <= mix <= 1:
        raise ValueError(f"mix must be in [0, 1], got {mix}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}.")
    student = torch.log_softmax(logits / temperature, -1)
    teacher = torch.log_softmax(teacher_logits.detach() / temperature, -1)
    if mix in (0, 1):
        first, second = (student, teacher) if mix else (teacher, student)
        return (first.exp() * (first - second)).sum(-1)
    mixture = torch.logaddexp(teacher + math.log(mix), student + math.log(1 - mix))
    to_mixture = mix * (teacher.exp() * (teacher - mixture)).sum(-1)
    return to_mixture + (1 - mix) * (student.exp() * (student - mixture)).sum(-1)
