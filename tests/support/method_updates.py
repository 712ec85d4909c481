"""Random updates in both forms: trajectory groups with scores for the learner, and ragged records for the float64 loops."""

import dataclasses
from dataclasses import dataclass

import method_reference as ref
import numpy as np
import torch
from synthetic_groups import synthetic_groups

from trial_ray.algorithms.methods import new_config
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.rows import TokenBatch, group_turn_rows
from trial_ray.trajectory import TrajectoryGroup

SUCCESSES = ("random", "random", "all", "none", "one survivor", "two survivors")
"""Successes in each group: two groups of both signs, three whose advantages are 0, and one with failed rollouts that succeeded."""
OBSERVATIONS, REWARDS = ("a room", "a shelf", "a fridge"), (0.0, 0.25, -0.5, 1.0)
RESPONSES = [np.arange(length, dtype=np.int32) for length in range(2, 7)]
MICROBATCH_ROWS = 6


@dataclass
class Update:
    groups: list[TrajectoryGroup]
    turns: list[ref.TurnRecord]

    @property
    def tokens(self):
        """Tokens of all turns; the last token of each turn is outside the mask."""
        return [token for turn in self.turns for token in (*turn.tokens, turn.masked)]

    def column(self, name):
        values = [torch.as_tensor(getattr(token, name), dtype=torch.float64) for token in self.tokens]
        return torch.stack(values).detach()


def random_update(seed):
    rng = np.random.default_rng(seed)
    groups, records = synthetic_groups(num_groups=len(SUCCESSES), seed=seed, responses=RESPONSES), []
    for index, (group, outcome) in enumerate(zip(groups, SUCCESSES, strict=True)):
        survivors = {"one survivor": [2], "two survivors": [0, 1]}.get(outcome, range(4))
        for rollout, trajectory in enumerate(group.trajectories):
            trajectory.success = outcome == "all" or (outcome == "two survivors" and rollout != 1)
            trajectory.success |= outcome == "random" and (rollout == 0 or (rollout > 1 and rng.random() < 0.5))
            trajectory.score = 0.25 + 0.5 * trajectory.success
            trajectory.ended = "terminated" if rollout in survivors else "failed"
            trajectory.turns = [
                dataclasses.replace(turn, observation=str(rng.choice(OBSERVATIONS)), reward=float(rng.choice(REWARDS)))
                for turn in trajectory.turns
            ]
            turns = [_record(rng, index, 4 * index + rollout, trajectory, turn) for turn in trajectory.turns]
            records += turns if rollout in survivors else []
    return Update(groups, records)


def _record(rng, group, number, trajectory, turn):
    *tokens, masked = (_token(rng) for _ in turn.response_ids)
    state = (turn.observation, turn.valid, trajectory.success, turn is trajectory.turns[-1])
    return ref.TurnRecord(group, number, *state, tokens, turn.reward, masked=masked)


def _token(rng):
    """Return a token with log-ratios on both sides of every bound."""
    old = float(rng.uniform(-6, -0.1))
    shift = rng.choice([0.0, rng.normal(0, 0.3), rng.normal(0, 1.5)])
    logp, entropy, divergence = (
        torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for value in (old + shift, rng.uniform(0, 3), rng.uniform(0, 1))
    )
    return ref.Token(
        old=old,
        teacher=float(old + rng.choice([rng.normal(0, 0.1), rng.normal(0, 2), -30.0], p=[0.5, 0.45, 0.05])),
        frozen=float(old + rng.choice([rng.normal(0, 0.5), 4.0], p=[0.9, 0.1])),
        in_action=bool(rng.random() < 0.5),
        logp=logp,
        entropy=entropy,
        divergence=divergence,
    )


def scored_rows(update, config):
    """Return the learner's rows with both views' scores; the last token of each turn is outside the mask."""
    rows = group_turn_rows(update.groups, config)
    rows.logprobs, rows.hindsight_logprobs = update.column("old"), update.column("teacher")
    rows.mask[rows.lengths.cumsum(0) - 1] = False
    return rows


def learner_losses(method, update, iteration, training):
    """Return the learner's losses of all microbatches, and their leaves, which are outputs of the forward pass."""
    config = new_config(method).debugging(seed=3)
    published = {"reward_scale": 10.0, "hindsight_start_iteration": 25}
    config.training(**{name: value for name, value in published.items() if hasattr(config, name)} | training)
    rule = config.method_class(config)
    rows = scored_rows(update, config)
    rows.reference_logprobs = update.column("frozen") if config.ref_kl_coeff else None
    rows.importance_weights = update.column("importance") if config.importance_cap else None
    rows.action_mask = update.column("in_action").bool() if rule.needs_action_spans else None
    rule.prepare(rows, update.groups, iteration)
    leaves = {name: update.column(name).requires_grad_() for name in ("logp", "entropy", "divergence")}
    outputs = {"logprobs": leaves["logp"], **leaves}
    losses = []
    for numbers in np.split(np.arange(len(rows)), range(MICROBATCH_ROWS, len(rows), MICROBATCH_ROWS)):
        part = {name: value[rows.token_positions(numbers)] for name, value in outputs.items()}
        losses.append(microbatch_loss(rule, TokenBatch.from_rows(rows, numbers, "cpu"), part, iteration)[0])
    return torch.stack(losses), leaves


def reference_losses(update, loss_of):
    turns = update.turns
    cuts = range(0, len(turns), MICROBATCH_ROWS)
    return torch.stack([torch.as_tensor(loss_of(turns[place : place + MICROBATCH_ROWS])) for place in cuts])


def reference_gradients(losses, tokens, name):
    leaves = [getattr(token, name) for token in tokens]
    return torch.stack(torch.autograd.grad(losses.sum(), leaves, retain_graph=True, materialize_grads=True))
