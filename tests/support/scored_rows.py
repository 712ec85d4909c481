"""Rows of random ids in both views, scored as the learner scores them, and by a model's own forward pass."""

from typing import NamedTuple

import numpy as np
import torch

from trial_ray.learner.rows import scored_turn
from trial_ray.models.layout import score_views
from trial_ray.trajectory import TeacherContext, Turn


class Row(NamedTuple):
    """A turn's ids, and its teacher context."""

    prompt_ids: np.ndarray
    insert_at: int
    response_ids: np.ndarray
    evidence_ids: np.ndarray = np.empty(0, np.int32)

    def view(self, hindsight=False):
        context = TeacherContext(self.evidence_ids, self.insert_at)
        return scored_turn(Turn(self.prompt_ids, self.response_ids, teacher_context=context), hindsight)


def score_rows(lm, rows, max_tokens):
    """Log-probabilities of the responses ``[2, T]``: without and with the teacher context."""
    views = {str(hindsight): [row.view(hindsight) for row in rows] for hindsight in (False, True)}
    scores, _ = score_views(lm, views, max_tokens=max_tokens)
    return torch.stack([*scores.values()])


@torch.no_grad()
def own_scores(lm, rows):
    """The same from the model's own forward pass of each row alone, unpadded, with ids that are put together here."""
    scores = []
    for hindsight in (False, True):
        for row in rows:
            prompt, evidence = row.prompt_ids.tolist(), row.evidence_ids.tolist() if hindsight else []
            context = [*prompt[: row.insert_at], *evidence, *prompt[row.insert_at :]]
            ids = torch.tensor([*context, *row.response_ids.tolist()])
            logprobs = lm(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[1:, None])[len(context) - 1 :, 0])
    return torch.cat(scores).view(2, -1)
