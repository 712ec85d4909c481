"""Loss of a pass, and weighted means of its metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from trial_ray.errors import MethodError
from trial_ray.learner.method import Method, Metrics
from trial_ray.learner.rows import TokenBatch
from trial_ray.objectives.divergences import k3_divergence
from trial_ray.objectives.losses import bounded_ratio, clamp_saturated, joint_loss
from trial_ray.objectives.segments import masked_mean

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

Sums = dict[tuple[str, str], tuple[float, float]]
"""By prefix and name, the weighted sum and the sum of weights."""


class WeightedMeans:
    """Adds up scalars with the weight of the piece of work that is under way; 0 adds nothing."""

    def __init__(self) -> None:
        self._sums: Sums = {}
        self._weight = 0.0

    @contextlib.contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """Give what is added inside this weight."""
        previous, self._weight = self._weight, weight
        try:
            yield
        finally:
            self._weight = previous

    def add(self, prefix: str, values: Mapping[str, torch.Tensor]) -> None:
        """Add scalars, each of shape ()."""
        if self._weight:
            for name, value in values.items():
                total, weight = self._sums.get((prefix, name), (0.0, 0.0))
                self._sums[prefix, name] = total + self._weight * value.detach().item(), weight + self._weight

    def take(self) -> Sums:
        """The sums so far; what follows begins at nothing."""
        sums, self._sums = self._sums, {}
        return sums


def means(sums: Iterable[Sums]) -> dict[tuple[str, str], float]:
    """The means of what several learners have added up."""
    totals: Sums = {}
    for each in sums:
        for key, (total, weight) in each.items():
            before = totals.get(key, (0.0, 0.0))
            totals[key] = before[0] + total, before[1] + weight
    return {key: total / weight for key, (total, weight) in totals.items()}


@dataclass(slots=True)
class LossTerms:
    """The terms of the loss, each of shape ().

    Attributes:
        outcome: L_out, the surrogate with its regularisation.
        surrogate: L_GRPO alone, to which the clamp of Eq. 8 refers.
        dense: the method's dense term before its coefficient, or ``None``.
        logged: scalars by prefix and name.
    """

    outcome: torch.Tensor
    surrogate: torch.Tensor
    dense: torch.Tensor | None
    logged: dict[str, Metrics] = field(default_factory=dict)


def loss_terms(
    method: Method[Any], config: RunSettings, tokens: TokenBatch, fwd_out: dict[str, torch.Tensor], iteration: int
) -> LossTerms:
    """Terms of a microbatch's loss, or of a part of one.

    L_out = L_GRPO + kl_coeff · KL − entropy_coeff · entropy, each a mean over ``tokens.mask``.

    Raises:
        MethodError: the method returned something else than its interface says.
    """
    logprobs = fwd_out["logprobs"]
    advantages = method.token_advantages(tokens, logprobs.detach(), iteration)
    _require_shape(method, "token_advantages", advantages, logprobs.shape)
    tokens = replace(tokens, advantages=advantages)
    surrogate = method.surrogate(_importance_weighted(tokens), logprobs, iteration)
    _require_shape(method, "surrogate", surrogate, torch.Size())
    entropy = masked_mean(fwd_out["entropy"], tokens.mask)
    outcome = surrogate - config.entropy_coeff * entropy
    if tokens.reference_logprobs is not None:
        kl = k3_divergence(logprobs, tokens.reference_logprobs, tokens.mask)
        outcome = outcome + config.kl_coeff * kl
    else:
        # Without a reference, the drift from the sampling policy is what there is to watch.
        kl = k3_divergence(logprobs.detach(), tokens.old_logprobs, tokens.mask)
    ratio = bounded_ratio(method.log_ratios(tokens, logprobs.detach()))
    clipped = ((ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)).to(logprobs.dtype)
    shared = {
        "surrogate_loss": surrogate,
        "entropy": entropy,
        "clip_fraction": masked_mean(clipped, tokens.mask),
        "ratio_mean": masked_mean(ratio, tokens.mask),
        "kl": kl,
    }
    dense, own = method.dense_loss(tokens, fwd_out, iteration)
    if dense is not None:
        _require_shape(method, "dense_loss", dense, torch.Size())
    return LossTerms(outcome, surrogate, dense, {"grpo": shared, method.name: own} if own else {"grpo": shared})


def _importance_weighted(tokens: TokenBatch) -> TokenBatch:
    """The tokens with w Â in place of Â: as w is never negative, that is w times each token's clipped surrogate."""
    if tokens.importance_weights is None:
        return tokens
    return replace(tokens, advantages=tokens.importance_weights * tokens.advantages)


@dataclass(frozen=True, slots=True)
class MinibatchClamp:
    """The clamp of Eq. 8 where it is taken over a whole minibatch.

    Attributes:
        saturated: whether it takes the dense gradient.
        contribution: what it then leaves of the dense term's value.
    """

    saturated: bool
    contribution: float


def minibatch_clamp(
    method: Method[Any], surrogate: torch.Tensor, dense: torch.Tensor, iteration: int
) -> MinibatchClamp:
    """The clamp of a minibatch from its two scalars, L_GRPO and L_dense, each of shape ()."""
    coefficient, clamp = method.dense_coefficient(iteration), method.clamp
    if clamp is None or not bool(surrogate.isfinite() & dense.isfinite()):
        # The backward passes meet the same numbers, and the step is skipped.
        return MinibatchClamp(False, 0.0)
    bound = clamp.alpha * surrogate.abs()
    saturated = bool(clamp_saturated(surrogate, dense, coefficient, clamp.alpha))
    return MinibatchClamp(saturated, (coefficient * dense).clamp(-bound, bound).item())


def microbatch_loss(
    method: Method[Any], terms: LossTerms, iteration: int, clamp: MinibatchClamp | None = None
) -> torch.Tensor:
    """L = L_out + clip_b(λ · dense), with b = α · |L_GRPO| (Eq. 8), shape ().

    Whether the clamp took the dense gradient is added to ``terms.logged``.

    Args:
        method: whose λ and α.
        terms: of the microbatch; where nothing is clamped on these rows alone, of any part of it.
        iteration: counted from 1.
        clamp: that of the whole minibatch; ``None`` clamps these rows by themselves.
    """
    if terms.dense is None:
        return terms.outcome
    coefficient = method.dense_coefficient(iteration)
    if method.clamp is None:
        return terms.outcome + coefficient * terms.dense
    alpha = method.clamp.alpha
    if clamp is not None:
        terms.logged.setdefault(method.name, {})["clamp_saturated_fraction"] = torch.tensor(float(clamp.saturated))
        return terms.outcome + (clamp.contribution if clamp.saturated else coefficient * terms.dense)
    saturated = clamp_saturated(terms.surrogate, terms.dense, coefficient, alpha)
    terms.logged.setdefault(method.name, {})["clamp_saturated_fraction"] = saturated.float()
    return joint_loss(terms.outcome, terms.surrogate, terms.dense, coefficient, alpha)


def _require_shape(method: Method[Any], hook: str, found: object, expected: torch.Size) -> None:
    if not isinstance(found, torch.Tensor) or found.shape != expected:
        described = f"shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise MethodError(
            f"{type(method).__name__}.{hook} must return a tensor of shape {list(expected)}; found {described}. "
            "trial_ray/learner/method.py describes each hook."
        )
