"""Random updates in both forms: trajectory groups and scores as the learner takes them, ragged records for the loops."""

from __future__ import annotations

from dataclasses import dataclass

import method_reference as ref
import numpy as np
import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.algorithms.methods import new_config
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.rows import TokenBatch, TurnRows, group_turn_rows
from trial_ray.models.logprobs import gather_divergence
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

SUCCESSES = ("random", "random", "all", "none", "one survivor", "two survivors")
"""How the rollouts of each group ended: two groups of both signs, three whose advantages are 0, one with successes that failed."""
OBSERVATIONS = ("a room", "a shelf", "a fridge")
HIDDEN, VOCABULARY = 4, 7
MICROBATCH_ROWS = 6


@dataclass
class Update:
    groups: list[TrajectoryGroup]
    turns: list[ref.TurnRecord]

    @property
    def tokens(self) -> list[ref.Token]:
        """Of every turn, the one outside of the mask last."""
        return [token for turn in self.turns for token in (*turn.tokens, turn.masked)]

    def column(self, name: str, dtype=torch.float64) -> torch.Tensor:
        values = [getattr(token, name) for token in self.tokens]
        return torch.tensor([value.item() if torch.is_tensor(value) else value for value in values], dtype=dtype)


def random_update(seed: int) -> Update:
    rng = np.random.default_rng(seed)
    groups, turns = [], []
    for index, outcome in enumerate(SUCCESSES):
        trajectories = []
        for rollout in range(4):
            success = outcome == "all" or (outcome == "two survivors" and rollout != 1)
            success |= outcome == "random" and (rollout == 0 or (rollout > 1 and rng.random() < 0.5))
            records = _records(rng, index, 4 * index + rollout, success)
            failed = rollout not in {"one survivor": [2], "two survivors": [0, 1]}.get(outcome, range(4))
            trajectories.append(_trajectory(records, success, failed))
            turns += [] if failed else records
        groups.append(TrajectoryGroup(f"task-{index}", trajectories))
    return Update(groups, turns)


def _records(rng, group, trajectory, success):
    length = rng.integers(1, 5)
    rewards = np.random.default_rng((group, trajectory)).choice([0.0, 0.25, -0.5, 1.0], length)
    return [
        ref.TurnRecord(
            group,
            trajectory,
            observation=str(rng.choice(OBSERVATIONS)),
            valid=bool(rng.random() < 0.8),
            success=success,
            last=place == length - 1,
            tokens=[_token(rng) for _ in range(rng.integers(1, 6))],
            masked=_token(rng),
            reward=float(rewards[place]),
        )
        for place in range(length)
    ]


def _token(rng) -> ref.Token:
    """Gaps on both sides of every bound."""
    old = float(rng.uniform(-6, -0.1))
    shift = rng.choice([0.0, rng.normal(0, 0.3), rng.normal(0, 1.5)])
    scalar = lambda value: torch.tensor(value, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return ref.Token(
        old=old,
        teacher=float(old + rng.choice([rng.normal(0, 0.1), rng.normal(0, 2), -30.0], p=[0.5, 0.45, 0.05])),
        frozen=float(old + rng.choice([rng.normal(0, 0.5), 4.0], p=[0.9, 0.1])),
        in_action=bool(rng.random() < 0.5),
        logp=scalar(old + shift),
        entropy=scalar(rng.uniform(0, 3)),
    )


def _trajectory(records, success, failed) -> Trajectory:
    turns = [
        Turn(
            prompt_ids=np.arange(3, dtype=np.int32),
            response_ids=np.arange(len(record.tokens) + 1, dtype=np.int32),
            logprobs=np.zeros(len(record.tokens) + 1, np.float32),
            weight_version=1,
            insert_at=2,
            observation=record.observation,
            action="look",
            valid=record.valid,
            outcome="Nothing happens.",
            reward=record.reward,
            finish_reason="stop",
        )
        for record in records
    ]
    return Trajectory("task", "pick", 0, turns, success, records[0].score, "failed" if failed else "terminated")


class Views:
    """Hidden states of both views and one output head, for the full-vocabulary divergence, all float64 leaves."""

    def __init__(self, update: Update, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.hidden, self.teacher = draw(len(update.tokens), HIDDEN).requires_grad_(), draw(len(update.tokens), HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        self.weight = self.head.weight
        with torch.no_grad():
            self.weight.copy_(1.5 * draw(VOCABULARY, HIDDEN))

    def divergence(self, config: GRPOConfig) -> torch.Tensor:
        settings = {"mix": config.jsd_mix, "temperature": config.jsd_temperature}
        return gather_divergence(self.hidden, self.head, self.teacher, self.head, **settings, chunk_tokens=16)


def scored_rows(update: Update, config: GRPOConfig) -> TurnRows:
    """The product's rows with both views' scores."""
    rows = group_turn_rows(update.groups, config)
    rows.logprobs, rows.hindsight_logprobs = update.column("old"), update.column("teacher")
    rows.mask = torch.tensor([each for turn in update.turns for each in [True] * len(turn.tokens) + [False]])
    return rows


def learner_losses(method: str, update: Update, iteration: int, training: dict, views: Views | None = None):
    """The product's losses of all microbatches; current log-probabilities and entropies as leaves."""
    config = new_config(method).debugging(seed=3)
    published = {"reward_scale": 10.0, "hindsight_start_iteration": 25}
    config.training(**{name: value for name, value in published.items() if hasattr(config, name)} | training)
    rule = config.method_class(config)
    rows = scored_rows(update, config)
    rows.reference_logprobs = update.column("frozen") if config.ref_kl_coeff else None
    rows.importance_weights = update.column("importance") if config.importance_cap else None
    rows.action_mask = update.column("in_action").bool() if rule.needs_action_spans else None
    rule.prepare(rows, update.groups, iteration)
    outputs = {name: update.column(name).requires_grad_() for name in ("logp", "entropy")}
    whole = {"logprobs": outputs["logp"], "entropy": outputs["entropy"]}
    whole |= {"divergence": views.divergence(config)} if views else {}
    losses = []
    for start in range(0, len(rows), MICROBATCH_ROWS):
        numbers = np.arange(start, min(start + MICROBATCH_ROWS, len(rows)))
        part = {name: value[rows.token_positions(numbers)] for name, value in whole.items()}
        tokens = TokenBatch.from_rows(rows, numbers, "cpu")
        losses.append(microbatch_loss(rule, config, tokens, part, iteration)[0])
    return torch.stack(losses), outputs


def reference_losses(update: Update, loss_of) -> torch.Tensor:
    turns = update.turns
    cuts = range(0, len(turns), MICROBATCH_ROWS)
    return torch.stack([torch.as_tensor(loss_of(turns[place : place + MICROBATCH_ROWS])) for place in cuts])


def reference_gradients(losses: torch.Tensor, tokens: list[ref.Token], name: str) -> torch.Tensor:
    leaves = [getattr(token, name) for token in tokens]
    return torch.stack(torch.autograd.grad(losses.sum(), leaves, retain_graph=True, materialize_grads=True))
