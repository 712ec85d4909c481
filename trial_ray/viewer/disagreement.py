"""How far hindsight speaks against the outcome of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trial_ray.viewer.training_records import TrainedTurn


def disagreement(trained: Sequence[TrainedTurn | None], success: bool) -> float | None:
    """Nats a token by which the weighted gaps of a trajectory push against its outcome.

    With the multiplier w of a token's turn (1 where the method has none) and its signed gap Δ,

        D = (1 / N) Σ w max(0, -σ Δ)

    over the N tokens that have a gap. σ is the sign of the turn's advantage; where that is 0 or unknown, +1 for a success and -1
    otherwise. The dense loss raises tokens with a positive gap and the outcome loss those of a positive advantage, so
    that D is 0 where both move every token the same way.

    Args:
        trained: what training recorded of each turn.
        success: whether the task was solved.

    Returns:
        D, or ``None`` where no gap was recorded.
    """
    total, tokens = 0.0, 0
    for turn in trained:
        if turn is None or not turn.gap:
            continue
        sign = np.sign(turn.advantage or 0.0) or (1.0 if success else -1.0)
        weight = 1.0 if turn.turn_weight is None else turn.turn_weight
        gap = np.asarray(turn.gap, np.float64)
        total += weight * float(np.maximum(0.0, -sign * gap).sum())
        tokens += len(gap)
    return total / tokens if tokens else None
