"""Every method's microbatch loss as plain Python loops over ragged turns, one token at a time in float64.

It shares no code with the product. A token's current log-probability and entropy are scalars with a graph
(``token.logp``, ``token.entropy``); whatever a method must not differentiate is a plain float. Settings are written
here as the methods' authors published them, so that the product's defaults are held to them too.
"""

from __future__ import annotations

import math
import statistics as statistics_module
from dataclasses import dataclass

import torch


@dataclass
class Token:
    old: float
    teacher: float
    frozen: float
    in_action: bool
    logp: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor | None = None
    importance: float = 1.0

    @property
    def here(self) -> float:
        return self.logp.item()


@dataclass
class TurnRecord:
    group: int
    trajectory: int
    observation: str
    valid: bool
    success: bool
    last: bool
    tokens: list[Token]
    reward: float = 0.0
    advantage: float = 0.0
    weight: float = 0.0
    masked: Token | None = None
    """A token outside of the mask, which no loop below reads."""

    @property
    def score(self) -> float:
        return 0.25 + 0.5 * self.success


# --- what the rollouts were worth


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


def row_advantages(turns, statistics, outcomes=None, penalty=0.1, scale=10.0):
    """A of every turn, with the penalty for a response without the required form; ``outcomes`` are the rollouts' successes."""
    pairs = list(zip(turns, outcomes or [scale * turn.success for turn in turns], strict=True))
    if statistics == "rows":
        return normalised(turns, [value - charge(turn, penalty) for turn, value in pairs], lambda turn: turn.group)
    advantage, unit = {}, {}
    for rows in _grouped(pairs, lambda pair: pair[0].group).values():
        rollouts = {turn.trajectory: value for turn, value in rows}
        advantage.update(zip(rollouts, advantages([list(rollouts.values())])[0], strict=True))
        spread = statistics_module.stdev(rollouts.values()) if len(set(rollouts.values())) > 1 else 1.0
        unit.update(dict.fromkeys(rollouts, spread + 1e-6 if spread != 1.0 else 1.0))
    return [advantage[turn.trajectory] - charge(turn, penalty) / unit[turn.trajectory] for turn in turns]


def charge(turn, penalty=0.1):
    return 0.0 if turn.valid else penalty


def normalised(turns, values, key, mode="mean_std_norm"):
    """The released normalisation of rows: less their group's mean, over its unbiased deviation + 1e-6 in ``mean_std_norm``."""
    result = {}
    for rows in _grouped(list(zip(turns, values, strict=True)), lambda pair: key(pair[0])).values():
        own = [value for _, value in rows]
        center = math.fsum(own) / len(own)
        unit = 1.0
        if mode == "mean_std_norm" and len(own) > 1:
            unit = math.sqrt(math.fsum((value - center) ** 2 for value in own) / (len(own) - 1)) + 1e-6
        flat = max(own) == min(own)
        result.update((id(turn), 0.0 if flat else (value - center) / unit) for turn, value in rows)
    return [result[id(turn)] for turn in turns]


def earned(turns, reward):
    """What every turn earned: a success or a score comes with the last one."""
    if reward == "return":
        return [turn.reward for turn in turns]
    return [turn.last * (turn.score if reward == "score" else turn.success) for turn in turns]


def returns_from(turns, rewards, discount):
    """G of every turn."""
    result = []
    for place, rest in enumerate(rewards):
        later = place
        while not turns[later].last:
            later += 1
            rest += discount ** (later - place) * rewards[later]
        result.append(rest)
    return result


def gigpo_advantages(turns, mode, statistics, coefficient=1.0, discount=0.95, reward="success", scale=10.0):
    """A_episode + ω · A_step; with statistics over rows as released, where the penalty is part of both terms' rewards."""
    rewards = [scale * value for value in earned(turns, reward)]
    returns = returns_from(turns, rewards, discount)
    totals = {rows[0][0].trajectory: math.fsum(value for _, value in rows) for rows in _consecutive(turns, rewards)}
    outcomes = [totals[turn.trajectory] for turn in turns]
    if statistics == "rows":
        returns = [own - charge(turn) for own, turn in zip(returns, turns, strict=True)]
        charged = [value - charge(turn) for value, turn in zip(outcomes, turns, strict=True)]
        episode = normalised(turns, charged, lambda turn: turn.group, mode)
    elif mode == "mean_std_norm":
        episode = row_advantages(turns, statistics, outcomes)
    else:
        rollouts = {turn.trajectory: (turn.group, totals[turn.trajectory]) for turn in turns}
        of_group = _grouped(rollouts.values(), lambda pair: pair[0])
        means = {group: math.fsum(value for _, value in pairs) / len(pairs) for group, pairs in of_group.items()}
        episode = [totals[turn.trajectory] - means[turn.group] - charge(turn) for turn in turns]
    step = normalised(turns, returns, lambda turn: (turn.group, turn.observation), mode)
    return [whole + coefficient * own for whole, own in zip(episode, step, strict=True)]


def per_turn_advantages(turns, mode, coefficient=1.0, discount=0.95, scale=10.0):
    """A of the outcome + ω · A of the turn: its discounted return, normalised over the turns of its group with the same index."""
    returns = [scale * value for value in returns_from(turns, earned(turns, "return"), discount)]
    indices = []
    for place in range(len(turns)):
        indices.append(0 if place == 0 or turns[place - 1].last else indices[-1] + 1)
    index_of = {id(turn): index for turn, index in zip(turns, indices, strict=True)}
    own = normalised(turns, returns, lambda turn: (turn.group, index_of[id(turn)]), mode)
    outcome_alone = gigpo_advantages(turns, mode, "trajectories", coefficient=0.0)
    return [whole + coefficient * part for whole, part in zip(outcome_alone, own, strict=True)]


def agentopsd_advantages(turns, mix, bound, decay):
    """A of every turn times (1 − λ) + λ w; the belief in success starts from the group's share of successes."""
    result = []
    for rows in _consecutive(turns, [turn.advantage for turn in turns]):
        ended = {turn.trajectory: turn.success for turn in turns if turn.group == rows[0][0].group}
        belief = prior = min(max(sum(ended.values()) / len(ended), 1e-4), 1 - 1e-4)
        revisions, gathered = [], 0.0
        for turn, _ in rows:
            gathered = decay * gathered + math.fsum(token.teacher - token.old for token in turn.tokens)
            odds = math.exp(gathered) * prior / (1 - prior)
            after = min(max(odds / (1 + odds), 1e-6), 1 - 1e-6)
            revisions.append(after - belief)
            belief = after
        center = math.fsum(revisions) / len(revisions)
        spread = math.sqrt(math.fsum((value - center) ** 2 for value in revisions) / len(revisions))
        for (_, advantage), value in zip(rows, revisions, strict=True):
            sign = (advantage > 0) - (advantage < 0)
            factor = min(max(1 + bound * sign * (value - center) / (spread + 1e-6), 1 - bound), 1 + bound)
            result.append(advantage * ((1 - mix) + mix * factor))
    return result


# --- profiles


def relative_weights(turns):
    """w_k = s_k / mean over tokens of the trajectory; 1 where that mean is nothing."""
    scores_of = [math.fsum(abs(gap(t.teacher, t.old)) for t in turn.tokens) / len(turn.tokens) for turn in turns]
    result = []
    for rows in _consecutive(turns, scores_of):
        lengths, scores = [len(turn.tokens) for turn, _ in rows], [score for _, score in rows]
        mean = math.fsum(n * s for n, s in zip(lengths, scores, strict=True)) / sum(lengths)
        result += [1.0 if mean <= 1e-8 else score / mean for score in scores]
    return result


# --- the loss of one microbatch


def mean(values):
    return sum(values) / len(values)


def clipped(advantage, token, dual=3.0, clips=(0.8, 1.2)):
    """One token's surrogate; ``max`` and ``min`` pass the gradient of the one they choose."""
    ratio = torch.exp(token.logp - token.old)
    low, high = (torch.tensor(each, dtype=torch.float64) for each in clips)
    inside = min(max(ratio, low), high)
    loss = max(-advantage * ratio, -advantage * inside)
    return min(loss, torch.tensor(-dual * advantage, dtype=torch.float64)) if advantage < 0 and dual else loss


def k3(token):
    difference = token.frozen - token.logp
    value = torch.exp(difference) - difference - 1
    return value if value <= 10 else torch.tensor(10.0, dtype=torch.float64)


def outcome(turns, advantage_of, kl=0.01, entropy=0.001, dual=3.0, clips=(0.8, 1.2)):
    """(L_out, L_GRPO) with Â = ``advantage_of(turn, token)``."""
    pairs = [(turn, token) for turn in turns for token in turn.tokens]
    surrogate = mean(
        [token.importance * clipped(advantage_of(turn, token), token, dual, clips) for turn, token in pairs]
    )
    total = surrogate - entropy * mean([token.entropy for _, token in pairs])
    return (total + kl * mean([k3(token) for _, token in pairs]) if kl else total), surrogate


def by_response(turns, level, how, length, dual=3.0, kl=0.01, entropy=0.001):
    """L_out with the ratio of tokens or of responses, and the surrogate's mean over tokens, rows, or a fixed length."""
    rows = []
    for turn in turns:
        whole = mean([token.logp - token.old for token in turn.tokens])
        shared = [Token(t.old, 0, 0, False, t.old + whole, t.entropy) for t in turn.tokens]
        own = shared if level == "sequence" else turn.tokens
        rows.append([t.importance * clipped(turn.advantage, o, dual) for t, o in zip(turn.tokens, own, strict=True)])
    losses = [loss for row in rows for loss in row]
    surrogate = {
        "tokens": lambda: mean(losses),
        "rows": lambda: mean([mean(row) for row in rows]),
        "fixed_length": lambda: sum(losses) / (len(rows) * length),
    }[how]()
    tokens = [token for turn in turns for token in turn.tokens]
    return surrogate - entropy * mean([t.entropy for t in tokens]) + kl * mean([k3(t) for t in tokens])


def rescaled(advantage, gap, strength):
    sign = (advantage > 0) - (advantage < 0)
    return advantage * ((1 - strength) + strength * min(max(math.exp(sign * gap), 0.8), 1.2))


def logistically_rescaled(advantage, token, strength):
    """StepOPSD's Â of an action token before steps are made equal."""
    sign = (advantage > 0) - (advantage < 0)
    weight = 2 / (1 + math.exp(-sign * (token.teacher - token.old)))
    return advantage * ((1 - strength) + strength * min(max(weight, 0.8), 1.2))


def step_factors(turns, strength):
    """Mean over a trajectory's steps of the mean |Â| of their action tokens, over that of the step, in [1/2, 2]."""
    result = []
    for rows in _consecutive(turns, turns):
        sizes = []
        for turn, _ in rows:
            own = [abs(logistically_rescaled(turn.advantage, t, strength)) for t in turn.tokens if t.in_action]
            sizes.append(math.fsum(own) / len(own) if own else None)
        steps = [size for size in sizes if size is not None]
        for size in sizes:
            alone = size is None or len(steps) == 1
            result.append(1.0 if alone else min(max(math.fsum(steps) / len(steps) / (size + 1e-6), 0.5), 2.0))
    return result


def bounded(value, limit):
    return max(-limit, min(limit, value))


def likelihood(turns, coefficient_of):
    """−mean of c · log π_θ."""
    return -mean([coefficient_of(turn, token) * token.logp for turn in turns for token in turn.tokens])


def plain(turn, token):
    return turn.advantage


def grpo(turns, **regularisation):
    return outcome(turns, plain, **regularisation)[0]


def trial(turns, coefficient, alpha=1.0, **regularisation):
    """Eq. 7 and Eq. 8; ``coefficient`` is λ of the iteration. Returns the loss, and whether the clamp is saturated."""
    loss, surrogate = outcome(turns, plain, **regularisation)
    term = coefficient * likelihood(turns, lambda turn, t: turn.weight * bounded(t.teacher - t.here, 2.0))
    limit = alpha * abs(surrogate.item())
    if coefficient and abs(term.item()) >= limit:
        return loss + bounded(term.item(), limit), True
    return loss + term, False


def rlsd(turns, strength):
    return outcome(turns, lambda turn, t: rescaled(turn.advantage, t.teacher - t.old, strength))[0]


def serl(turns, strength):
    def advantage_of(turn, token):
        if not token.in_action:
            return turn.advantage
        return rescaled(turn.advantage, bounded(token.teacher - token.here, 20.0), strength)

    return outcome(turns, advantage_of, kl=0.0)[0]


def stepopsd(turns, strength):
    def advantage_of(turn, token):
        return (
            turn.weight * logistically_rescaled(turn.advantage, token, strength) if token.in_action else turn.advantage
        )

    return outcome(turns, advantage_of)[0]


def sdar(turns):
    gate = lambda turn, t: 0.01 / (1 + math.exp(-5 * (t.teacher - t.here)))  # noqa: E731
    return grpo(turns) + likelihood(turns, gate)


def grpo_opsd(turns):
    return grpo(turns) + likelihood(turns, lambda turn, t: 0.005)


def opsd_sampled(turns):
    return likelihood(turns, lambda turn, t: t.teacher - t.here)


def opsd_jsd(turns):
    return mean([token.divergence for turn in turns for token in turn.tokens])


def jsd(logits, teacher_logits, mix=0.5, temperature=1.1):
    """β KL(T ‖ M) + (1 − β) KL(S ‖ M) of each row, M = β T + (1 − β) S."""
    student, teacher = (torch.softmax(each / temperature, -1) for each in (logits, teacher_logits))
    mixture = mix * teacher + (1 - mix) * student
    terms = mix * teacher * torch.log(teacher / mixture) + (1 - mix) * student * torch.log(student / mixture)
    return terms.sum(-1)


# --- ragged bookkeeping


def _grouped(items, key):
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _consecutive(turns, values):
    """(turn, value) pairs of one trajectory after the other."""
    return _grouped(list(zip(turns, values, strict=True)), lambda pair: pair[0].trajectory).values()
