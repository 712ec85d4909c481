"""Base class of the training methods, with the hooks that the learner calls.

All methods share one loss::

    L = surrogate(Â) + clip(λ · dense) + regularisation

A method determines the advantages Â, the surrogate, the dense term with its mask and the schedule of its coefficient λ, and the
context that the teacher π_T sees. The dense term is usually −mean_mask(c_t · log π_θ) with a detached coefficient c_t for each
token t; the methods OPSD and OPD (on-policy self-distillation and on-policy distillation) can use a divergence between whole
distributions instead.
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
"""Scalars by name; the learner logs them with the method's ``name`` as a prefix, averaged over an iteration."""


@dataclass(frozen=True)
class Divergence:
    """Parameters of the generalised Jensen-Shannon divergence between policy and teacher over the whole vocabulary.

    Attributes:
        mix: the teacher's share in the mixture of both distributions.
        temperature: divides the logits of policy and teacher.
    """

    mix: float
    temperature: float


def per_token(hook: Hook) -> Hook:
    """Mark a hook that computes each token's value from this token alone, or the mean of such values over ``tokens.mask``.

    If all hooks of a loss are marked and the settings keep it a mean over tokens (see :meth:`Method.adds_up`), a microbatch that
    does not fit into memory is split by rows, and the gradients of the pieces are added up. Otherwise, the forward passes of such a
    microbatch are computed twice, so that the hooks see all of its tokens. A subclass that overrides a marked hook has to mark
    its own function.
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
        needs_scores: whether the learner computes log-probabilities of responses before the update; if not, the rows'
            log-probabilities are 0 and are not compared with the engine's.
        config: the algorithm's config, which contains the method's settings.
        state: state of the method between updates, of plain values; it is saved in checkpoints, and is the same on every learner.
    """

    name: ClassVar[str] = "grpo"
    needs_teacher_context: ClassVar[bool] = False
    needs_action_spans: ClassVar[bool] = False
    own_advantages: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Reject attributes with names similar to a hook's: a misspelt hook would never be called.

        Raises:
            MethodError: there is such an attribute; the message contains the most similar hook.
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
        """Parameters of the divergence from the teacher that training passes compute for ``dense_loss``; ``None`` to compute
        none."""
        return None

    @property
    def clamp(self) -> float | None:
        """The α of the bound on the dense term; ``None`` for no bound.

        λ · dense is clipped to the range ±α · |L_GRPO| in each microbatch (TRIAL paper, Eq. 8).
        """
        return None

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> Tensor:
        """Return the advantage A of each turn of the groups' completed rollouts in order, float64 ``[K]``.

        The default is the group-relative advantage of the turn's rollout (TRIAL paper, Eq. 1), minus the penalty for a response
        without the required format, plus the turn's own advantage with ``reward="per_turn"``. The result must depend only on
        the config and, for the turns of a group, on that group: env runners call the hook with single groups, and the setting
        ``drop_zero_variance_groups`` drops groups whose advantages are all 0. No log-probabilities are known yet.

        Raises:
            TrainingDivergedError: a reward is not finite.
        """
        return group_advantages(groups, self.config)

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Compute from the scored rows the values that stay fixed during the update; return metrics. Called once per iteration.

        Every learner calls it with the same rows and must return the same result.

        Args:
            rows: K turns with their log-probabilities under the policy before the update and, if there is one, the teacher.
                ``scores``, ``weights``, ``terms`` and ``mask`` may be replaced; ``advantages`` may only be scaled.
            groups: the groups that the rows come from, in the same order.
            iteration: counted from 1.
        """
        return {}

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return the advantage Â of every token, ``[T]``: its turn's advantage, plus its entry of ``tokens.terms``, if any.

        Args:
            tokens: a whole microbatch, or T tokens of it if all hooks of the loss are marked with :func:`per_token`.
            logprobs: log-probabilities of the tokens under the current policy, float ``[T]``, detached.
            iteration: counted from 1.
        """
        return tokens.advantages if tokens.terms is None else tokens.advantages + tokens.terms

    @per_token
    def surrogate(self, tokens: TokenBatch, logprobs: Tensor, iteration: int) -> Tensor:
        """Return L_GRPO, the surrogate loss of one microbatch, shape ().

        It is the mean (by the setting ``surrogate_mean``) of token losses (by the setting ``policy_loss``). If ``ratio_level``
        or ``surrogate_mean`` is not the default, :meth:`surrogate` is always called with whole microbatches.

        Args:
            tokens: a whole microbatch, or T tokens of it as in :meth:`token_advantages`; its ``advantages`` are the result of
                :meth:`token_advantages`, times the importance weights if there are any.
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
        """Return the dense term without its coefficient, a mean over ``tokens.mask``, shape (); ``None`` without a dense term.

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
        """Return whether the loss is known to be a mean over tokens, so that a microbatch can be split by rows (:func:`per_token`).

        The learner calls this; no subclass needs to override it. A hook counts as a mean over tokens if :func:`per_token` marks it.
        """
        if self.clamp is not None and math.isfinite(self.clamp) and self.dense_coefficient(iteration) > 0:
            return False
        hooks = (self.token_advantages, self.surrogate, self.log_ratios, self.dense_loss)
        is_token_mean = self.config.ratio_level == "token" and self.config.surrogate_mean == "tokens"
        return is_token_mean and all(getattr(hook, "is_per_token", False) for hook in hooks)


def linear_decay(initial: float, iterations: int, iteration: int) -> float:
    """Return the value of a linear decay from ``initial`` in iteration 1, by equal steps, to 0 after ``iterations`` steps."""
    return initial * max(0.0, 1 - (iteration - 1) / iterations)
