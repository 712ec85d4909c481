"""Rows of random ids in both views, scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trial_ray.learner.rows import scored_turn
from trial_ray.models.packing import score_views
from trial_ray.models.prefix_tree import ScoredSequence
from trial_ray.prompts.teacher_context import Evidence
from trial_ray.trajectory import Turn


class Row(NamedTuple):
    """A turn's ids, and the evidence of its hindsight view."""

    prompt_ids: np.ndarray
    insert_at: int
    response_ids: np.ndarray
    evidence_ids: np.ndarray = np.empty(0, np.int32)

    def view(self, hindsight: bool = False) -> ScoredSequence:
        turn = Turn(self.prompt_ids, self.response_ids)
        return scored_turn(turn, Evidence(self.evidence_ids, self.insert_at) if hindsight else None)


def score_rows(lm: Any, rows: Sequence[Row], max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the responses in both views."""
    views = {str(hindsight): [row.view(hindsight) for row in rows] for hindsight in (False, True)}
    scores, _ = score_views(lm, views, max_tokens=max_tokens)
    return scores["False"], scores["True"]
