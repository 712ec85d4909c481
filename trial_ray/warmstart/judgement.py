"""Does a model's hindsight view judge actions better than the model acts? Measured on held-out games, before any reinforcement.

The model plays. Of each of its actions two things are known that the model does not know: whether the demonstrator would have
done the same in its place, and whether the environment's planner needs fewer actions after it than before. The gap between the
two views of the turn (Eq. 4) should tell the one kind from the other, or nothing that it weighs is worth weighing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from transformers import PreTrainedModel

from trial_ray.environments.adapter import Demonstrator, EnvironmentAdapter, plan
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry, make_entries
from trial_ray.objectives.allocation import hindsight_gap, relative_weights, turn_scores
from trial_ray.objectives.segments import segment_sum
from trial_ray.rollout.env_runner import outside_loop
from trial_ray.rollout.episode import Decision, History, Player
from trial_ray.rollout.hindsight import augment
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.warmstart.cloning import Example, collate, pad_id_of
from trial_ray.warmstart.demonstrations import make_demonstrator, outcome_evidence
from trial_ray.warmstart.policy import HeldOutGames, PlayResult, computing_with, load_policy, prompt_builder
from trial_ray.warmstart.settings import EVALUATED, WarmStartSettings

GAP_CLIP = 2.0
"""c of Eq. 4, in nats: TRIAL's default."""
RESAMPLES = 1000
BATCH = 64
"""Prompts scored together."""


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One turn of the policy.

    Attributes:
        episode: index of its episode.
        action: what it did.
        action_class: class of the decision, as in the paper's Figure 3.
        planned: whether the demonstrator would have done the same, or drawn between it and others.
        decisive: whether the environment's planner needs fewer actions after it; ``None`` where there is no planner, or no plan.
        gap: mean over the response's tokens of the signed, clipped gap (Eq. 4), nats; above 0 where hindsight confirms.
        log_ratio: log π(y|h⁺) / π(y|h) of the whole response, not clipped, nats.
        score: turn score s_k (Eq. 5), nats.
        weight: turn weight w_k (Eq. 6).
    """

    episode: int
    action: str
    action_class: str
    planned: bool
    decisive: bool | None
    gap: float
    log_ratio: float
    score: float
    weight: float


@dataclass(frozen=True)
class Judgement:
    """All turns of the games that a model played.

    Attributes:
        turns: in the order of games and turns.
        result: how it played.
    """

    turns: tuple[JudgedTurn, ...]
    result: PlayResult

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Mean gap and weight by kind and class of turn, and areas under the curve with 95 % intervals, for JSON."""
        return {
            "games": self.result.episodes,
            "won": self.result.successes,
            "turns": len(self.turns),
            "planned": _figures([turn for turn in self.turns if turn.planned]),
            "wasted": _figures([turn for turn in self.turns if not turn.planned]),
            "decisive": _figures([turn for turn in self.turns if turn.decisive]),
            "routine": _figures([turn for turn in self.turns if turn.decisive is False]),
            "auc_wasted": _auc(self.turns, lambda turn: not turn.planned),
            "auc_routine": _auc(
                [turn for turn in self.turns if turn.decisive is not None], lambda turn: not turn.decisive
            ),
            "classes": {
                name: _figures([turn for turn in self.turns if turn.action_class == name])
                for name in sorted({turn.action_class for turn in self.turns})
            },
        }

    def __str__(self) -> str:
        """One sentence for people."""
        gaps = [self.figures[kind]["gap"] for kind in ("planned", "wasted")]
        told = ["unknown" if gap is None else f"{gap:+.2f} nats a token" for gap in gaps]
        auc = self.figures["auc_wasted"]
        area = "unknown" if auc is None else f"{auc[0]:.2f} [{auc[1]:.2f}, {auc[2]:.2f}]"
        return (
            f"Hindsight view: gap {told[0]} for planned actions, {told[1]} for wasted ones; "
            f"area under the curve as a detector of wasted turns {area}"
        )


def judge(
    model: PreTrainedModel,
    tokenizer: Any,
    entry: EnvironmentEntry,
    games: HeldOutGames,
    seed: int,
) -> Judgement:
    """Let a model play, and compare what its two views say of each turn with what its demonstrator and planner say.

    Args:
        model: the policy, which scores both views too.
        tokenizer: its tokenizer.
        entry: the environment; its adapter's demonstrator plans.
        games: what it plays, each once.
        seed: of its responses.

    Raises:
        InfrastructureError: every episode failed.
        ConfigError: nothing demonstrates.
    """
    watchers: dict[str, _Watcher] = {}

    def watch(task: str, player: Player, env: GuardedEnv) -> Player:
        watchers[task] = _Watcher(player, env, make_demonstrator(entry))
        return watchers[task]

    trajectories = games.trajectories(model, seed, watch)
    numbers = zip(*_views(model, tokenizer, trajectories), strict=True)
    turns = [
        JudgedTurn(index, turn.action, kind, planned, decisive, *next(numbers))
        for index, trajectory in enumerate(trajectories)
        for turn, kind, planned, decisive in zip(
            trajectory.turns,
            entry.adapter.turn_classes([turn.action for turn in trajectory.turns], trajectory.ended == "terminated"),
            watchers[trajectory.task_id].planned,
            watchers[trajectory.task_id].decisive(trajectory),
            strict=True,
        )
    ]
    return Judgement(tuple(turns), PlayResult.of(trajectories))


def judge_model(
    settings: WarmStartSettings, adapters: Sequence[EnvironmentAdapter] = (), games: int | None = None
) -> Judgement:
    """Judge the model that ``settings.model_path`` names, on the held-out games of a warm start with these settings.

    Args:
        settings: environment, prompts and responses, as in training; device and threads.
        adapters: the user's.
        games: how many; ``None`` plays ``settings.evaluation_games``.

    Raises:
        CheckpointError, ChatTemplateError: ``model_path`` holds no causal LM with a usable tokenizer.
        InfrastructureError: every episode failed.
        ConfigError: the environment is not registered, nothing demonstrates, or ``device`` is ``cuda`` where there is none.
    """
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters)
    number = settings.evaluation_games if games is None else games
    return outside_loop(lambda: judge_policy(replace(settings, evaluation_games=number), entry))


def judge_policy(settings: WarmStartSettings, entry: EnvironmentEntry) -> Judgement:
    """Judge the model that ``settings.model_path`` names on ``settings.evaluation_games`` games; errors as :func:`judge_model`."""
    with computing_with(settings):
        model, tokenizer = load_policy(settings, entry)
        builder = prompt_builder(settings, entry, tokenizer)
        with HeldOutGames(settings, entry, EVALUATED, tokenizer, builder) as games:
            return judge(model, tokenizer, entry, games, settings.seed)


class _Watcher:
    """A policy's player whose demonstrator and planner look at every turn and decide nothing."""

    def __init__(self, player: Player, env: GuardedEnv, demonstrator: Demonstrator) -> None:
        self._player = player
        self._env = env
        self._demonstrator = demonstrator
        self._remaining: list[int | None] = []
        self.planned: list[bool] = []

    async def act(self, result: StepResult, history: History, step: int) -> Decision | None:
        """What the policy does; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            self._demonstrator.reset(result.task, result.observation, 0)
        _, planned = plan(self._demonstrator, result.observation, result.admissible_actions)
        self._remaining.append(self._env.commands_to_win())  # also before a turn that the prompt limit prevents
        decision = await self._player.act(result, history, step)
        if decision is not None:
            self.planned.append(decision.action in planned)
            self._demonstrator.carried_out(decision.action)
        return decision

    def decisive(self, trajectory: Trajectory) -> Iterator[bool | None]:
        """For each turn, whether it shortened the plan; not known of the last one of a game that ended without being won."""
        remaining = [*self._remaining, 0 if trajectory.success else None]
        for index in range(len(trajectory.turns)):
            before, then = remaining[index : index + 2]
            yield None if before is None or then is None else then < before


def _views(
    model: PreTrainedModel, tokenizer: Any, trajectories: Sequence[Trajectory]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Signed gap, log-ratio, score and weight of every turn."""
    ordinary, hindsight, counts, trajectory_ids = [], [], [], []
    for index, trajectory in enumerate(trajectories):
        for turn, evidence in zip(trajectory.turns, outcome_evidence(trajectory, tokenizer), strict=True):
            ordinary.append(Example(turn.prompt_ids, turn.response_ids))
            hindsight.append(Example(augment(turn.prompt_ids, turn.insert_at, evidence), turn.response_ids))
            counts.append(len(turn.response_ids))
            trajectory_ids.append(index)
    turn_ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    logprobs, hindsight_logprobs = (_logprobs(model, rows, pad_id_of(tokenizer)) for rows in (ordinary, hindsight))
    gap = hindsight_gap(hindsight_logprobs, logprobs, GAP_CLIP)
    scores, lengths = turn_scores(gap, torch.ones_like(gap, dtype=torch.bool), turn_ids, len(counts))
    weights = relative_weights(scores, lengths, torch.tensor(trajectory_ids, dtype=torch.int64))
    signed = segment_sum(gap, turn_ids, len(counts)) / lengths
    log_ratio = segment_sum(hindsight_logprobs - logprobs, turn_ids, len(counts))
    return signed.tolist(), log_ratio.tolist(), scores.tolist(), weights.tolist()


@torch.no_grad()
def _logprobs(model: PreTrainedModel, examples: Sequence[Example], pad_id: int) -> torch.Tensor:
    """Log-probabilities of the responses' tokens, end to end: float32 ``[T]``."""
    training = model.training
    model.eval()
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]))
    found: list[torch.Tensor] = [torch.empty(0)] * len(examples)
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        batch = collate([examples[index] for index in rows], pad_id).to(model.device)
        logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits.float()
        logprobs = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
        for row, index in enumerate(rows):
            found[index] = logprobs[row][batch.response[row, 1:]].cpu()
    model.train(training)
    return torch.cat(found) if found else torch.empty(0)


def _figures(turns: Sequence[JudgedTurn]) -> dict[str, float | int | None]:
    """Number of turns, mean gap and weight, and the standard error of the weight over episodes' means."""
    if not turns:
        return {"turns": 0, "gap": None, "weight": None, "weight_error": None}
    by_episode: dict[int, list[float]] = {}
    for turn in turns:
        by_episode.setdefault(turn.episode, []).append(turn.weight)
    means = [float(np.mean(weights)) for weights in by_episode.values()]
    error = float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    return {
        "turns": len(turns),
        "gap": float(np.mean([turn.gap for turn in turns])),
        "weight": float(np.mean(means)),
        "weight_error": error,
    }


def _auc(turns: Sequence[JudgedTurn], positive: Callable[[JudgedTurn], bool]) -> tuple[float, float, float] | None:
    """Area under the curve of the gap, sign reversed, as a detector; with a 95 % interval over resampled episodes.

    ``None`` where all turns are of one kind.
    """
    labels = np.array([positive(turn) for turn in turns], dtype=bool)
    gaps = np.array([turn.gap for turn in turns])
    area = auc(-gaps, labels)
    if area is None:
        return None
    episodes = np.array([turn.episode for turn in turns])
    rows = [np.flatnonzero(episodes == episode) for episode in np.unique(episodes)]
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([rows[index] for index in random.integers(len(rows), size=len(rows))])
        found = auc(-gaps[drawn], labels[drawn])
        resampled += [] if found is None else [found]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return area, float(low), float(high)


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Probability that a positive has a higher score than a negative, ties counted half; ``None`` without one of the two.

    Args:
        scores: float ``[N]``.
        positive: bool ``[N]``.
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    ranks = rankdata(scores)
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))
