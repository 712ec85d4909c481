"""Interface of a method: its hooks in the learner.

All methods share one loss::

    L = surrogate(Â) + clip(λ · dense) + regularisation,        dense = −mean_mask(c_t · log π_θ), c_t detached

A method determines Â, the surrogate, c_t and the mask, the teacher context of π_T, and the schedule.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from trial_ray.config.run import RunSettings
from trial_ray.errors import MethodError
from trial_ray.learner.advantages import group_advantages
from trial_ray.learner.rows import TokenBatch, TurnRows
from trial_ray.objectives.losses import cispo_losses, clipped_losses, sapo_losses, sequence_log_ratios, surrogate_mean
from trial_ray.objectives.segments import zero_outside
from trial_ray.trajectory import TrajectoryGroup

Config = TypeVar("Config", bound=RunSettings)
Hook = TypeVar("Hook", bound=Callable[..., Any])
Metrics = dict[str, Tensor]
"""Scalars by name; the learner logs them under the method's ``name``, averaged over an iteration."""


@dataclass(frozen=True)
class Divergence:
    """The generalised Jensen-Shannon divergence of both views over the whole vocabulary.

    Attributes:
        mix: the teacher's share in the mixture.
        temperature: divides both views' logits.
    """

    mix: float
    temperature: float


def per_token(hook: Hook) -> Hook:
    """Declare that a hook computes a value for each token from that token alone, or the mean of such values over ``tokens.mask``.

    A microbatch that does not fit into memory is then computed in parts that are added up, if this holds for all hooks of its loss.
    Otherwise it is forwarded twice, so that its hooks see all of its tokens. A declaration is for one function: a subclass that
    overrides the hook declares its own.
    """
    hook.__dict__["is_per_token"] = True
    return hook


class Method(Generic[Config]):
    """Plain GRPO, and the hooks in which other methods differ from it.

    A method with its own settings specifies its config class: ``class Mine(Method["MineConfig"])``.

    Attributes:
        name: prefix of the method's metrics.
        needs_teacher_context: whether a config without ``teacher_context`` is rejected.
        needs_action_spans: whether the method needs ``TurnRows.action_mask``.
        own_advantages: whether the method does not use group-relative returns; a config with an ``advantage_estimator`` or
            ``advantage_norm="batch_norm"`` is then rejected.
        needs_scores: whether responses are scored before the update; if not, all log-probabilities of the rows are 0, and nothing
            is compared with an engine.
        config: the algorithm's config, which contains the method's settings.
        state: state of the method between updates, of plain values; it is saved in checkpoints, and is the same on every learner.
    """

    name: ClassVar[str] = "grpo"
    needs_teacher_context: ClassVar[bool] = False
    needs_action_spans: ClassVar[bool] = False
    own_advantages: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Reject names that are similar to those of hooks, since they would never be called.

        Raises:
            MethodError: there is such a name; the message contains the most similar hook.
        """
        super().__init_subclass__()
        hooks = {name for base in cls.__bases__ for name in dir(base) if not name.startswith("_")} - {"name"}
        for name in sorted(vars(cls).keys() - hooks):
            near = [] if name.startswith("_") else difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
            if near:
                raise MethodError(
                    f"{cls.__name__} defines {name!r}, which is not a hook of a method. Did you mean {near[0]!r}? Call it _{name} "
                    "if it is the method's own."
                )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state: dict[str, Any] = {}

    @property
    def divergence(self) -> Divergence | None:
        """The divergence passed to ``dense_loss`` as ``fwd_out["divergence"]``, for which the training forward also scores the
        view with the teacher context; ``None``: no divergence."""
        return None

    @property
    def clamp(self) -> float | None:
        """α: in each microbatch, λ · dense is bounded by α · |L_GRPO| (Eq. 8); ``None``: no bound."""
        return None

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> Tensor:
        """Return A of each turn of the groups' completed rollouts in order, float64 ``[K]``, before anything is scored.

        The default is the group-relative advantage of the turn's rollout (Eq. 1), minus the penalty for a response without the
        required form, plus the turn's own advantage with ``reward="per_turn"``. A group for which all are 0 counts as one without
        variance, which ``drop_zero_variance_groups`` drops; env runners call this with one group. The result depends only on the
        config and, for the turns of a group, on that group.

        Raises:
            TrainingDivergedError: a reward is not finite.
        """
        return group_advantages(groups, self.config)

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compute from the scored rows the values that stay fixed during the update; return metrics. Called once per iteration.

        Every learner calls it with the same rows and must return the same result.

        Args:
            rows: K turns with both views' log-probabilities under the policy before the update. ``scores``, ``weights``,
                ``terms`` and ``mask`` may be replaced; ``advantages`` may be scaled, but terms are added in :meth:`advantages`.
            groups: the groups that the rows come from, in the same order.
            iteration: counted from 1.
        """
        return {}

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return Â of every token, ``[T]``: A of its turn, plus its own term if :meth:`prepare` has set ``terms``.

        Args:
            tokens: a whole microbatch; T tokens of it if all hooks of the loss are :func:`per_token`.
            logprobs: float ``[T]`` of the current policy, detached.
            iteration: counted from 1.
        """
        return tokens.advantages if tokens.terms is None else tokens.advantages + tokens.terms

    @per_token
    def surrogate(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return L_GRPO of one microbatch, shape (): the mean that ``surrogate_mean`` selects, of the surrogate of ``policy_loss``.

        A surrogate with another ``ratio_level`` or ``surrogate_mean`` than the defaults always gets whole microbatches.

        Args:
            tokens: a whole microbatch, or T tokens of it as in :meth:`token_advantages`, with the advantages of that hook.
            logprobs: float ``[T]``, log π_θ in nats, with their graph.
            iteration: counted from 1.
        """
        config, advantages, mask = self.config, tokens.advantages, tokens.mask
        clips, log_ratio = (config.clip_low, config.clip_high), self.log_ratios(tokens, logprobs)
        if config.policy_loss == "cispo":
            losses = cispo_losses(log_ratio, logprobs, advantages, mask, *clips)
        elif config.policy_loss == "sapo":
            losses = sapo_losses(log_ratio, advantages, mask, config.sapo_temperatures)
        else:
            losses = clipped_losses(log_ratio, advantages, mask, *clips, config.dual_clip)
        unit = (tokens.turn_ids, tokens.num_turns)
        return surrogate_mean(losses, mask, *unit, config.surrogate_mean, config.max_response_tokens)

    @per_token
    def log_ratios(self, tokens: TokenBatch, logprobs: Tensor) -> Tensor:
        """Return log π_θ / π_old of every token, ``[T]``, or of its whole response with ``ratio_level="sequence"``."""
        log_ratio = zero_outside(logprobs - tokens.old_logprobs, tokens.mask)
        if self.config.ratio_level == "token":
            return log_ratio
        return sequence_log_ratios(log_ratio, tokens.mask, tokens.turn_ids, tokens.num_turns)

    @per_token
    def dense_loss(
        self, tokens: TokenBatch, fwd_out: dict[str, Tensor], iteration: int
    ) -> tuple[Tensor | None, Metrics]:
        """Return the dense term before its coefficient, a mean over ``tokens.mask``, shape (); ``None`` without a dense term.

        Args:
            tokens: a whole microbatch, or T tokens of it as in :meth:`token_advantages`.
            fwd_out: ``logprobs [T]`` of the current policy, with their graph; ``divergence [T]`` if ``divergence`` is set.
            iteration: counted from 1.

        Returns:
            The term, and metrics to log.
        """
        return None, {}

    def dense_coefficient(self, iteration: int) -> float:
        """Return λ, the coefficient of the dense term."""
        return 1.0

    def adds_up(self, iteration: int) -> bool:
        """Return whether the loss is known to be a mean over tokens, in which case parts of a microbatch can be added up.

        The learner calls this; no method needs to change it. A hook counts as a mean over tokens if it is :func:`per_token`.
        """
        if self.clamp is not None and math.isfinite(self.clamp) and self.dense_coefficient(iteration) > 0:
            return False
        hooks = (self.token_advantages, self.surrogate, self.log_ratios, self.dense_loss)
        is_token_mean = self.config.ratio_level == "token" and self.config.surrogate_mean == "tokens"
        return is_token_mean and all(getattr(hook, "is_per_token", False) for hook in hooks)


def linear_decay(initial: float, iterations: int, iteration: int) -> float:
    """Return the value of a linear decay from ``initial`` in iteration 1, by equal steps, to 0 after ``iterations`` steps."""
    return initial * max(0.0, 1 - (iteration - 1) / iterations)
