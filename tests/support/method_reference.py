"""Every method's microbatch loss as plain Python loops over ragged turns, one token at a time in float64.

The loops share no code with the package. A token's current log-probability and entropy are scalars with a graph (``token.logp``,
``token.entropy``); values without a gradient are plain floats. Settings are those that the methods' authors published, so the
package's defaults are compared with them too.
"""

import math
import statistics
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
    def here(self):
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
    weight: float = 1.0
    truncated: bool = False
    masked: Token | None = None
    """A token outside the mask; the loops ignore it."""

    @property
    def score(self):
        return 0.25 + 0.5 * self.success


# --- advantages


def relative(values, mode="mean_std_norm"):
    """Eq. 1 of one group: minus the mean, over the unbiased deviation + 1e-6 in ``mean_std_norm``."""
    if max(values) == min(values):
        return [0.0] * len(values)
    center = statistics.fmean(values)
    unit = statistics.stdev(values) + 1e-6 if mode == "mean_std_norm" else 1.0
    return [(value - center) / unit for value in values]


def bounded(value, limit):
    return max(-limit, min(limit, value))


def row_advantages(turns, advantage_statistics="trajectories", outcomes=None, mode="mean_std_norm"):
    """A of every turn, minus the penalty for a response without the required format; ``outcomes`` default to scaled successes."""
    outcomes = outcomes or [10.0 * turn.success for turn in turns]
    if advantage_statistics == "rows":
        charged = [value - charge(turn) for turn, value in zip(turns, outcomes, strict=True)]
        return normalised(turns, charged, lambda turn: turn.group, mode)
    advantage, unit = {}, {}
    for rows in _grouped(zip(turns, outcomes, strict=True), lambda pair: pair[0].group).values():
        rollouts = {turn.trajectory: value for turn, value in rows}
        values = list(rollouts.values())
        advantage.update(zip(rollouts, relative(values, mode), strict=True))
        scaled = mode == "mean_std_norm" and len(set(values)) > 1
        unit.update(dict.fromkeys(rollouts, statistics.stdev(values) + 1e-6 if scaled else 1.0))
    return [advantage[turn.trajectory] - charge(turn) / unit[turn.trajectory] for turn in turns]


def charge(turn):
    return 0.0 if turn.valid else 0.1


def normalised(turns, values, key, mode):
    """The released normalisation of rows: relative to the rows with the same key."""
    result = {}
    for rows in _grouped(zip(turns, values, strict=True), lambda pair: key(pair[0])).values():
        own = relative([value for _, value in rows], mode)
        result.update((id(turn), value) for (turn, _), value in zip(rows, own, strict=True))
    return [result[id(turn)] for turn in turns]


def earned(turns, reward):
    """Reward of every turn; a success or a score arrives with the last turn."""
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


def gigpo_advantages(
    turns,
    advantage_norm="mean_std_norm",
    advantage_statistics="trajectories",
    step_coeff=1.0,
    step_discount=0.95,
    reward="success",
):
    """A_episode + ω · A_step; with statistics over rows as released, where the penalty is part of both terms' rewards."""
    rewards = [10.0 * value for value in earned(turns, reward)]
    returns = returns_from(turns, rewards, step_discount)
    totals = {
        rollout[0].trajectory: math.fsum(10.0 * value for value in earned(rollout, reward))
        for rollout in _rollouts(turns)
    }
    if advantage_statistics == "rows":
        returns = [own - charge(turn) for own, turn in zip(returns, turns, strict=True)]
    episode = row_advantages(turns, advantage_statistics, [totals[turn.trajectory] for turn in turns], advantage_norm)
    step = normalised(turns, returns, lambda turn: (turn.group, turn.observation), advantage_norm)
    return [whole + step_coeff * own for whole, own in zip(episode, step, strict=True)]


def per_turn_advantages(turns, advantage_norm="mean_std_norm", turn_coeff=1.0, turn_discount=0.95):
    """A of the outcome + ω · A of the turn: its discounted return, normalised over the turns of its group with the same index."""
    returns = [10.0 * value for value in returns_from(turns, earned(turns, "return"), turn_discount)]
    index_of = {id(turn): index for rollout in _rollouts(turns) for index, turn in enumerate(rollout)}
    own = normalised(turns, returns, lambda turn: (turn.group, index_of[id(turn)]), advantage_norm)
    outcome_alone = row_advantages(turns, mode=advantage_norm)
    return [whole + turn_coeff * part for whole, part in zip(outcome_alone, own, strict=True)]


def agentopsd_advantages(turns, revision_mix=0.5, revision_bound=0.2, belief_decay=1.0):
    """A of every turn times (1 − λ) + λ w; the belief in success starts from the group's share of successes."""
    result = []
    for rollout in _rollouts(turns):
        ended = {turn.trajectory: turn.success for turn in turns if turn.group == rollout[0].group}
        belief = prior = min(max(statistics.fmean(ended.values()), 1e-4), 1 - 1e-4)
        revisions, gathered = [], 0.0
        for turn in rollout:
            gathered = belief_decay * gathered + math.fsum(token.teacher - token.old for token in turn.tokens)
            odds = math.exp(gathered) * prior / (1 - prior)
            after = min(max(odds / (1 + odds), 1e-6), 1 - 1e-6)
            revisions.append(after - belief)
            belief = after
        center, spread = statistics.fmean(revisions), statistics.pstdev(revisions)
        for turn, value in zip(rollout, revisions, strict=True):
            sign = (turn.advantage > 0) - (turn.advantage < 0)
            change = revision_bound * bounded(sign * (value - center) / (spread + 1e-6), 1.0)
            result.append(turn.advantage * (1 + revision_mix * change))
    return result


def accepted(turns, reward_threshold):
    """1 for the turns of rollouts that reached the threshold; 0.2 is below every score, 1 is only reached by success."""
    return [float(reward_threshold < 0.25 or turn.success) for turn in turns]


def first_turns(turns, share):
    """1 for the turns within the share of the longest rollout, rounded up, else 0."""
    lengths = [*map(len, _rollouts(turns))]
    depth = math.ceil(share * max(lengths))
    return [float(place < depth) for length in lengths for place in range(length)]


# --- profiles


def relative_weights(turns):
    """w_k = s_k / mean over the trajectory's tokens; 1 if that mean is 0."""
    result = []
    for rollout in _rollouts(turns):
        lengths = [len(turn.tokens) for turn in rollout]
        scores = [statistics.fmean(abs(bounded(t.teacher - t.old, 2.0)) for t in turn.tokens) for turn in rollout]
        mean = math.fsum(n * s for n, s in zip(lengths, scores, strict=True)) / sum(lengths)
        result += [1.0 if mean <= 1e-8 else score / mean for score in scores]
    return result


# --- the loss of one microbatch


def mean(values):
    return sum(values) / len(values)


def clipped(advantage, log_ratio, dual=3.0, clips=(0.8, 1.2)):
    """One token's surrogate; ``max`` and ``min`` pass the gradient of the value that they return."""
    ratio = torch.exp(log_ratio)
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in clips)
    inside = min(max(ratio, low), high)
    loss = max(-advantage * ratio, -advantage * inside)
    return min(loss, torch.tensor(-dual * advantage, dtype=torch.float64)) if advantage < 0 and dual else loss


def k3(token):
    difference = token.frozen - token.logp
    value = torch.exp(difference) - difference - 1
    return value if value <= 10 else torch.tensor(10.0, dtype=torch.float64)


def plain(turn, token):
    return turn.advantage


def outcome(turns, advantage_of, kl=0.01, entropy=0.001, level="token", how="tokens", **clips):
    """(L_out, L_GRPO) with Â = ``advantage_of(turn, token)``, ratios of tokens or of responses, and one of the three means.

    The maximum length of responses is 512 tokens.
    """
    rows = []
    for turn in turns:
        log_ratios = [token.logp - token.old for token in turn.tokens]
        log_ratios = [mean(log_ratios)] * len(log_ratios) if level == "sequence" else log_ratios
        pairs = zip(turn.tokens, log_ratios, strict=True)
        rows.append([token.importance * clipped(advantage_of(turn, token), ratio, **clips) for token, ratio in pairs])
    losses = [loss for row in rows for loss in row]
    surrogate = {
        "tokens": mean(losses),
        "rows": mean([*map(mean, rows)]),
        "fixed_length": sum(losses) / (len(rows) * 512),
    }[how]
    tokens = [token for turn in turns for token in turn.tokens]
    regularisation = kl * mean([k3(token) for token in tokens]) - entropy * mean([token.entropy for token in tokens])
    return surrogate + regularisation, surrogate


def rescaled(advantage, gap, strength, logistic=False):
    """RLSD's and SERL's Â of a token; StepOPSD's with ``logistic``, before steps are made equal."""
    sign = (advantage > 0) - (advantage < 0)
    factor = 2 / (1 + math.exp(-sign * gap)) if logistic else math.exp(sign * gap)
    return advantage * ((1 - strength) + strength * min(max(factor, 0.8), 1.2))


def step_factors(turns, strength):
    """Mean over a trajectory's steps of the mean |Â| of their action tokens, over that of the step, in [1/2, 2]."""
    result = []
    for rollout in _rollouts(turns):
        sizes = []
        for turn in rollout:
            own = [abs(rescaled(turn.advantage, t.teacher - t.old, strength, True)) for t in turn.tokens if t.in_action]
            sizes.append(statistics.fmean(own) if own else None)
        steps = [size for size in sizes if size is not None]
        for size in sizes:
            alone = size is None or len(steps) == 1
            result.append(1.0 if alone else min(max(statistics.fmean(steps) / (size + 1e-6), 0.5), 2.0))
    return result


def likelihood(turns, coefficient_of):
    """−mean of c · log π_θ."""
    return -mean([coefficient_of(turn, token) * token.logp for turn in turns for token in turn.tokens])


def grpo(turns, **settings):
    return outcome(turns, plain, **settings)[0]


def trial(turns, coefficient, alpha=1.0, **settings):
    """Eq. 7 and Eq. 8; ``coefficient`` is λ of the iteration. Return the loss, and whether the clamp is saturated."""
    loss, surrogate = outcome(turns, plain, **settings)
    term = coefficient * likelihood(turns, lambda turn, t: turn.weight * bounded(t.teacher - t.here, 2.0))
    limit = alpha * abs(surrogate.item())
    if coefficient and abs(term.item()) >= limit:
        return loss + bounded(term.item(), limit), True
    return loss + term, False


def rlsd(turns, strength):
    return outcome(turns, lambda turn, t: rescaled(turn.advantage, t.teacher - t.old, strength))[0]


def serl(turns, strength):
    def advantage_of(turn, token):
        own = rescaled(turn.advantage, token.teacher - token.here, strength)
        return own if token.in_action else turn.advantage

    return outcome(turns, advantage_of, kl=0.0)[0]


def stepopsd(turns, strength):
    def advantage_of(turn, token):
        own = turn.weight * rescaled(turn.advantage, token.teacher - token.old, strength, True)
        return own if token.in_action else turn.advantage

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


def opd(turns, clip=math.inf, coefficient=0.0):
    """The reverse KL of sampled tokens times the ratio to the old policy; a turn's weight is 0 beyond the curriculum's depth."""
    loss, _ = outcome(turns, lambda turn, t: coefficient * turn.advantage, kl=0.0, entropy=0.0)
    terms = [
        turn.weight * bounded(t.teacher - t.here, clip) * torch.exp(t.logp - t.old)
        for turn in turns
        for t in turn.tokens
    ]
    return loss - mean(terms)


# --- ragged bookkeeping


def _grouped(items, key):
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _rollouts(turns):
    """The turns of one trajectory after the other."""
    return _grouped(turns, lambda turn: turn.trajectory).values()
