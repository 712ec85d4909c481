"""View piece: the privileged text of every turn, as token ids that go into its prompt (Eq. 2, Eq. 3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule

from trial_ray.hindsight.aug import encode_evidence
from trial_ray.hindsight.privileged_views import TurnContext, privileged_view
from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.learner.connectors.plan_rows import UPDATE_PLAN
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

_NOT_NEEDED = np.empty(0, np.int32)


class PrivilegedViews(ConnectorV2):
    """Serialise what the second view shows; the recorded response itself stays as it is.

    Args:
        config: says which view.
        rank: number of this learner, which needs the views of the rows that it scores.
        of_all_rows: whether the training forward scores second views too, of whichever rows fall to the learner.
    """

    def __init__(self, config: AlgorithmConfig, rank: int = 0, of_all_rows: bool = False) -> None:
        super().__init__()
        self.config = config
        self.rank = rank
        self.of_all_rows = of_all_rows

    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[TrajectoryGroup],
        shared_data: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill the evidence of the rows in ``shared_data``."""
        tokenizer = rl_module[DEFAULT_MODULE_ID].unwrapped().tokenizer
        survivors = [trajectory for group in episodes for trajectory in group.survivors]
        rows = None if self.of_all_rows else set(shared_data[UPDATE_PLAN].scoring[self.rank].tolist())
        shared_data[TURN_ROWS].evidence_ids = encode_views(survivors, self.config, tokenizer, rows)
        return batch


def encode_views(
    trajectories: Sequence[Trajectory], config: AlgorithmConfig, tokenizer: Any, rows: Collection[int] | None = None
) -> list[np.ndarray]:
    """Token ids of what the second view of every turn shows, int32 ``[z_k]`` each, all trajectories' turns in order.

    Args:
        trajectories: whose turns.
        config: names the view and its limit.
        tokenizer: the policy's.
        rows: numbers of the turns that are wanted, counted over all trajectories; the others get no ids. ``None``: all.
    """
    contexts = [
        TurnContext(
            environment=str(config.env),
            family=trajectory.family,
            outcome=turn.outcome,
            terminal=trajectory.ended == "terminated" and index == len(trajectory.turns) - 1,
            success=trajectory.success,
            solution=trajectory.solution,
            skills=config.skills,
        )
        for trajectory in trajectories
        for index, turn in enumerate(trajectory.turns)
    ]
    return [
        encode_evidence(privileged_view(config.privileged_view, context), tokenizer, config.max_outcome_tokens)
        if rows is None or row in rows
        else _NOT_NEEDED
        for row, context in enumerate(contexts)
    ]
