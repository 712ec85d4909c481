"""The paper's equations as plain Python loops over ragged lists of floats, sharing no code with the product.

``batch[trajectory][turn]`` is a list of tokens; a token has ``logp``, ``old``, ``teacher`` (log π_θ, log π_old,
log π_T), ``advantage`` and ``m``.
"""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass
class Token:
    logp: float
    old: float
    teacher: float
    advantage: float
    m: bool


logprob = st.floats(-6, 0, allow_subnormal=False)
token = st.builds(Token, logprob, logprob, logprob, st.floats(-3, 3, allow_subnormal=False), st.booleans())
batches = st.lists(st.lists(st.lists(token, max_size=4), min_size=1, max_size=5), min_size=1, max_size=4)


def tokens_of(batch):
    return [token for trajectory in batch for turn in trajectory for token in turn]


def flat(batch, dtype=torch.float64):
    """The same batch as the product takes it: flat tensors, turn of each token, trajectory of each turn."""
    turns = [(t, turn) for t, trajectory in enumerate(batch) for turn in trajectory]
    columns = {
        name: torch.tensor([getattr(token, name) for token in tokens_of(batch)], dtype=dtype)
        for name in ("logp", "old", "teacher", "advantage")
    }
    columns["mask"] = torch.tensor([token.m for token in tokens_of(batch)], dtype=torch.bool)
    columns["turn_ids"] = torch.tensor([k for k, (_, turn) in enumerate(turns) for _ in turn], dtype=torch.long)
    columns["trajectory_ids"] = torch.tensor([t for t, _ in turns], dtype=torch.long)
    columns["num_turns"] = len(turns)
    return columns


def advantages(groups, epsilon=1e-6):
    """Eq. 1 for a list of groups of returns."""
    result = []
    for returns in groups:
        n = len(returns)
        if n == 1 or len(set(returns)) == 1:
            result.append([0.0] * n)
            continue
        mean = math.fsum(returns) / n
        deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in returns) / (n - 1))
        result.append([(r - mean) / (deviation + epsilon) for r in returns])
    return result


def gap(teacher, student, clip=2.0):
    """Eq. 4 for one token."""
    return max(-clip, min(clip, teacher - student))


def scores(trajectory, clip=2.0):
    """Eq. 5: (s_k, n_k) of every turn of one trajectory."""
    result = []
    for turn in trajectory:
        eligible = [abs(gap(token.teacher, token.old, clip)) for token in turn if token.m]
        result.append((math.fsum(eligible) / len(eligible) if eligible else 0.0, len(eligible)))
    return result


def weights(trajectory, clip=2.0):
    """Eq. 6: w_k of every turn of one trajectory."""
    rated = scores(trajectory, clip)
    total_tokens = sum(n for _, n in rated)
    mean = math.fsum(n * s for s, n in rated) / total_tokens if total_tokens else 0.0
    return [0.0 if n == 0 else 1.0 if mean <= 1e-8 else s / mean for s, n in rated]


def surrogate(batch, logps, low=0.2, high=0.2, dual=None):
    """L_GRPO as a function of the current log-probabilities, one per token in flat order."""
    losses = []
    for token, logp in zip(tokens_of(batch), logps, strict=True):
        if not token.m:
            continue
        ratio = math.exp(logp - token.old)
        loss = max(-token.advantage * ratio, -token.advantage * min(max(ratio, 1 - low), 1 + high))
        if dual is not None and token.advantage < 0:
            loss = min(loss, -dual * token.advantage)
        losses.append(loss)
    return math.fsum(losses) / len(losses) if losses else 0.0


def importance(batch, cap, mode):
    """Weight of every token by turns, from π_old = ``old`` and π_engine = ``teacher``."""
    result = []
    for trajectory in batch:
        for turn in trajectory:
            whole = math.exp(math.fsum(token.old - token.teacher for token in turn))
            for token in turn:
                ratio = whole if mode.startswith("sequence") else math.exp(token.old - token.teacher)
                above = cap if mode.endswith("truncate") else 0.0
                result.append(above if ratio > cap else ratio)
    return result


def response_surrogate(batch, logps, ratio_level, mean, length, low=0.2, high=0.2, dual=None):
    """L_GRPO with the ratio of tokens or responses, and the mean over tokens, rows, or rows of a fixed length."""
    rows, position = [], 0
    for trajectory in batch:
        for turn in trajectory:
            own = list(zip(turn, logps[position : position + len(turn)], strict=True))
            position += len(turn)
            eligible = [(token, logp - token.old) for token, logp in own if token.m]
            average = math.fsum(log for _, log in eligible) / len(eligible) if eligible else 0.0
            losses = []
            for token, log in eligible:
                ratio = math.exp(average if ratio_level == "sequence" else log)
                loss = max(-token.advantage * ratio, -token.advantage * min(max(ratio, 1 - low), 1 + high))
                losses.append(min(loss, -dual * token.advantage) if dual and token.advantage < 0 else loss)
            rows.append(losses)
    total = math.fsum(loss for losses in rows for loss in losses)
    if mean == "tokens":
        return total / max(1, sum(len(losses) for losses in rows))
    if mean == "fixed_length":
        return total / (len(rows) * length)
    return math.fsum(math.fsum(losses) / len(losses) for losses in rows if losses) / len(rows)


def dense(batch, logps, clip=2.0):
    """Eq. 7. Gaps are taken at ``token.logp``, not at ``logps``: they are constants of the gradient."""
    terms, position = [], 0
    for trajectory in batch:
        for turn, weight in zip(trajectory, weights(trajectory, clip), strict=True):
            for token in turn:
                if token.m:
                    terms.append(weight * gap(token.teacher, token.logp, clip) * logps[position])
                position += 1
    return -math.fsum(terms) / len(terms) if terms else 0.0


def joint(batch, logps, coefficient, alpha, clip=2.0):
    """Eq. 8 with L_out = L_GRPO; the bound is taken at ``token.logp``."""
    here = [token.logp for token in tokens_of(batch)]
    bound = alpha * abs(surrogate(batch, here))
    term = coefficient * dense(batch, logps, clip)
    return surrogate(batch, logps) + max(-bound, min(bound, term))


def numeric_gradient(function, at, step=1e-6):
    """Central differences of ``function(list) -> float``."""
    gradient = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return gradient
