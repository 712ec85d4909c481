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

from trial_ray.environments.adapter import Demonstrator, EnvironmentAdapter, begin, plan
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry, make_entries
from trial_ray.learner.packing import Row, score_rows
from trial_ray.objectives.allocation import hindsight_gap
from trial_ray.objectives.segments import segment_sum
from trial_ray.rollout.env_runner import outside_loop
from trial_ray.rollout.episode import Decision, History, Player, derive_seed
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.warmstart.demonstrations import DemonstratorPlayer, make_demonstrator, outcome_evidence
from trial_ray.warmstart.policy import HeldOutGames, PlayResult, Watch, computing_with, load_policy, prompt_builder
from trial_ray.warmstart.settings import EVALUATED, WarmStartSettings

GAP_CLIP = 2.0
"""c of Eq. 4, in nats: TRIAL's default."""
RESAMPLES = 1000
MAX_TOKENS = 16_384
"""Scored in one forward pass."""


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """One turn of the policy.

    Attributes:
        episode: index of its episode.
        action: what it did.
        planned: whether the demonstrator would have done the same, or drawn between it and others.
        decisive: whether the environment's planner needs fewer actions after it; ``None`` where there is no planner, or no plan.
        gap: mean over the response's tokens of the signed, clipped gap (Eq. 4), nats; above 0 where hindsight confirms.
    """

    episode: int
    action: str
    planned: bool
    decisive: bool | None
    gap: float


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
        """Number and mean gap of turns by kind, and areas under the curve with 95 % intervals, for JSON."""
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
    plays: Watch | None = None,
) -> Judgement:
    """Let a model play, and compare what its two views say of each turn with what its demonstrator and planner say.

    Args:
        model: the policy, which scores both views too.
        tokenizer: its tokenizer.
        entry: the environment; its adapter's demonstrator plans.
        games: what it plays, each once.
        seed: of its responses.
        plays: makes the player of an episode; ``None`` lets the model play.

    Raises:
        InfrastructureError: every episode failed.
        ConfigError: nothing demonstrates.
    """
    watchers: dict[str, _Watcher] = {}

    def watch(task: str, player: Player, env: GuardedEnv) -> Player:
        watchers[task] = _Watcher(plays(task, player, env) if plays else player, env, make_demonstrator(entry))
        return watchers[task]

    trajectories = games.trajectories(model, seed, watch)
    gaps = iter(_gaps(model, tokenizer, trajectories))
    turns = [
        JudgedTurn(index, turn.action, planned, decisive, next(gaps))
        for index, trajectory in enumerate(trajectories)
        for turn, planned, decisive in zip(
            trajectory.turns,
            watchers[trajectory.task_id].planned,
            watchers[trajectory.task_id].decisive(trajectory),
            strict=True,
        )
    ]
    return Judgement(tuple(turns), PlayResult.of(trajectories))


def judge_model(
    settings: WarmStartSettings,
    adapters: Sequence[EnvironmentAdapter] = (),
    games: int | None = None,
    demonstrator: float | None = None,
) -> Judgement:
    """Judge the model that ``settings.model_path`` names, on the held-out games of a warm start with these settings.

    Args:
        settings: environment, prompts and responses, as in training; device and threads.
        adapters: the user's.
        games: how many; ``None`` plays ``settings.evaluation_games``.
        demonstrator: probability of another action than the planned one with which the demonstrator plays, and the model
            scores its turns; ``None`` lets the model play.

    Raises:
        CheckpointError, ChatTemplateError: ``model_path`` holds no causal LM with a usable tokenizer.
        InfrastructureError: every episode failed.
        ConfigError: the environment is not registered, nothing demonstrates, or ``device`` is ``cuda`` where there is none.
    """
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters)
    number = settings.evaluation_games if games is None else games
    settings = replace(settings, evaluation_games=number)
    if demonstrator is not None:
        # Action noise would carry out another action than the response says.
        settings = replace(settings, suboptimal_probability=demonstrator, action_noise=0.0)
    return outside_loop(lambda: judge_policy(settings, entry, demonstrated=demonstrator is not None))


def judge_policy(settings: WarmStartSettings, entry: EnvironmentEntry, *, demonstrated: bool = False) -> Judgement:
    """Judge the model that ``settings.model_path`` names on ``settings.evaluation_games`` games; errors as :func:`judge_model`."""
    with computing_with(settings):
        model, tokenizer = load_policy(settings, entry)
        builder = prompt_builder(settings, entry, tokenizer)

        def demonstrate(task: str, player: Player, env: GuardedEnv) -> Player:
            seed = [derive_seed(settings.seed, task)]
            return DemonstratorPlayer(settings, tokenizer, builder, make_demonstrator(entry), seed, env.walkthrough)

        with HeldOutGames(settings, entry, EVALUATED, tokenizer, builder) as games:
            return judge(model, tokenizer, entry, games, settings.seed, demonstrate if demonstrated else None)


class _Watcher:
    """A policy's player whose demonstrator and planner look at every turn and decide nothing."""

    def __init__(self, player: Player, env: GuardedEnv, demonstrator: Demonstrator) -> None:
        self._player = player
        self._env = env
        self._demonstrator = demonstrator
        self._remaining: list[int | None] = []
        self.planned: list[bool] = []

    async def act(self, result: StepResult, history: History, step: int) -> Decision | None:
        """The policy's action; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            begin(self._demonstrator, result.task, result.observation, 0, self._env.walkthrough)
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


def _gaps(model: PreTrainedModel, tokenizer: Any, trajectories: Sequence[Trajectory]) -> list[float]:
    """Mean signed gap of every turn."""
    rows = [
        Row(turn.prompt_ids, turn.insert_at, turn.response_ids, evidence)
        for trajectory in trajectories
        for turn, evidence in zip(trajectory.turns, outcome_evidence(trajectory, tokenizer), strict=True)
    ]
    ordinary, hindsight = score_rows(model, rows, max_tokens=MAX_TOKENS)
    gap = hindsight_gap(hindsight, ordinary, GAP_CLIP).cpu()
    counts = torch.tensor([len(row.response_ids) for row in rows], dtype=torch.int64)
    turn_ids = torch.repeat_interleave(torch.arange(len(rows)), counts)
    gaps: list[float] = (segment_sum(gap, turn_ids, len(rows)) / counts).tolist()
    return gaps


def _figures(turns: Sequence[JudgedTurn]) -> dict[str, float | int | None]:
    """Number and mean gap of turns."""
    return {"turns": len(turns), "gap": float(np.mean([turn.gap for turn in turns])) if turns else None}


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
