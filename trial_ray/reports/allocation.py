"""The allocation trace: TRIAL's turn scores and weights on recorded trajectories, by class of decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from trial_ray.config.run import RunSettings
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.learner.connectors import encode_views
from trial_ray.learner.packing import score_rows
from trial_ray.learner.rows import TurnRows, required
from trial_ray.objectives.allocation import hindsight_gap, relative_weights, turn_scores
from trial_ray.reports.traces import Trace, TracedTurn
from trial_ray.rollout.trajectory import Trajectory


def trace_trajectories(
    lm: PreTrainedModel, tokenizer: Any, trajectories: Sequence[Trajectory], config: RunSettings, gap_clip: float
) -> list[Trace]:
    """Score recorded responses in both views with the given weights, as the learner does, and allocate.

    Args:
        lm: the policy; both views are scored by it.
        tokenizer: its tokenizer.
        trajectories: with at least one turn each.
        config: environment, view and limits.
        gap_clip: c of Eq. 4, in nats.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if not turns:
        return []
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    trajectory_ids = torch.repeat_interleave(torch.arange(len(trajectories)), lengths)
    rows = TurnRows(turns, trajectory_ids, torch.zeros(len(turns)), encode_views(trajectories, config, tokenizer))
    ordinary, hindsight = score_rows(
        lm,
        rows.model_rows(range(len(rows)), with_evidence=True),
        two_views=True,
        max_tokens=config.max_tokens_per_forward,
        temperature=config.temperature,
    )
    gap = hindsight_gap(required(hindsight).float().cpu(), ordinary.float().cpu(), gap_clip)
    scores, counts = turn_scores(gap, torch.ones_like(gap, dtype=torch.bool), rows.turn_ids, len(turns))
    weights = relative_weights(scores, counts, trajectory_ids)
    numbers = iter(zip(scores.tolist(), weights.tolist(), counts.tolist(), strict=True))
    return [
        Trace(
            trajectory.task_id,
            trajectory.family,
            trajectory.success,
            [
                TracedTurn(turn.action, turn.outcome, name, *next(numbers))
                for turn, name in zip(
                    trajectory.turns, _turn_classes(config.adapter_of(trajectory.environment), trajectory), strict=True
                )
            ],
        )
        for trajectory in trajectories
    ]


def _turn_classes(adapter: EnvironmentAdapter, trajectory: Trajectory) -> list[str]:
    return adapter.turn_classes([turn.action for turn in trajectory.turns], trajectory.ended == "terminated")
