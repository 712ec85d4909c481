"""What a method adds to GRPO: the interface between the one learner and the methods' own files.

One loss covers them all::

    L = PPO(Â) − mean_mask(c_t · log π_θ) + regularisation,        c_t detached

A method decides Â, c_t and the mask, the privileged view π_T sees, and the schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trial_ray.learner.turn_rows import TokenBatch, TurnRows
from trial_ray.rollout.trajectory import TrajectoryGroup

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

Metrics = dict[str, torch.Tensor]
"""Scalars by name; the learner logs them under the method's ``name``, averaged over an iteration."""


class Method:
    """Plain GRPO, and the hooks in which other methods differ from it.

    Attributes:
        name: prefix of the method's metrics.
        needs_action_spans: whether ``prepare`` wants ``TurnRows.action_mask``.
        needs_divergence: whether ``add_dense`` wants ``fwd_out["divergence"]``, the full-vocabulary divergence of both
            views, for which the training forward scores the hindsight view too; the config then holds ``jsd_mix`` and
            ``jsd_temperature``.
        config: the algorithm's config, which holds the method's settings.
    """

    name: ClassVar[str] = "grpo"
    needs_action_spans: ClassVar[bool] = False
    needs_divergence: ClassVar[bool] = False

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config: Any = config

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Once an iteration, on the scored rows: fix what stays the same during the update.

        Args:
            rows: K turns with both views' log-probabilities under the policy before the update; may be changed.
            groups: the groups that the rows come from, in the same order.
            iteration: counted from 1.
        """
        return {}

    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Â of every token of a microbatch, ``[T]``; ``logprobs [T]`` are those of the current policy, detached."""
        return tokens.advantages

    def add_dense(
        self,
        outcome: torch.Tensor,
        surrogate: torch.Tensor,
        tokens: TokenBatch,
        fwd_out: dict[str, torch.Tensor],
        iteration: int,
    ) -> tuple[torch.Tensor, Metrics]:
        """The microbatch's loss: the outcome loss and the method's dense term.

        Args:
            outcome: shape (), the surrogate with its regularisation.
            surrogate: shape (), the surrogate alone.
            tokens: the microbatch, T tokens.
            fwd_out: ``logprobs [T]`` of the current policy, with their graph; ``divergence [T]`` where asked for.
            iteration: counted from 1.

        Returns:
            The loss, shape (), and what to log.
        """
        return outcome, {}


def linear_decay(initial: float, iterations: int, iteration: int) -> float:
    """``initial`` in iteration 1, then down by equal steps to 0 after ``iterations`` of them."""
    return initial * max(0.0, 1 - (iteration - 1) / iterations)
