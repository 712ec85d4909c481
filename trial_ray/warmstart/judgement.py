"""Does a model's hindsight view judge actions better than the model acts? Measured on held-out games, before any reinforcement.

The model plays. Of each of its actions two things are known that the model does not know: whether the demonstrator would have
done the same in its place, and whether the environment's planner needs fewer actions after it than before. The gap between the
two views of the turn (Eq. 4) should tell the one kind from the other, or nothing that it weighs is worth weighing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.stats import rankdata

from trial_ray.environments.adapter import Demonstrator, begin, plan
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.learner.packing import score_views, scored_turn
from trial_ray.objectives.allocation import hindsight_gap
from trial_ray.rollout.env_runner import outside_loop
from trial_ray.rollout.episode import History, Player, derive_seed
from trial_ray.rollout.hindsight import Evidence
from trial_ray.rollout.trajectory import Trajectory, Turn
from trial_ray.warmstart.demonstrations import DemonstratorPlayer, outcome_evidence
from trial_ray.warmstart.policy import HeldOutGames, Policy, Watch, computing_with, load_policy, make_demonstrator
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
        decisive: whether the environment's planner needs fewer actions after it; ``None`` if there is no planner, or no plan.
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
        trajectories: the games.
    """

    turns: tuple[JudgedTurn, ...]
    trajectories: list[Trajectory]

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Number and mean gap of turns by kind, and areas under the curve with 95 % intervals, for JSON."""
        return {
            "games": len(self.trajectories),
            "won": sum(each.success for each in self.trajectories),
            "turns": len(self.turns),
            "planned": self._kind("planned", True),
            "wasted": self._kind("planned", False),
            "decisive": self._kind("decisive", True),
            "routine": self._kind("decisive", False),
            "auc_wasted": _auc(self.turns, "planned"),
            "auc_routine": _auc(self.turns, "decisive"),
        }

    def _kind(self, name: str, value: bool) -> dict[str, float | int | None]:
        gaps = [turn.gap for turn in self.turns if getattr(turn, name) is value]
        return {"turns": len(gaps), "gap": float(np.mean(gaps)) if gaps else None}

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


def judge(policy: Policy, games: HeldOutGames, plays: Watch | None = None) -> Judgement:
    """Let a model play, and compare what its two views say of each turn with what its demonstrator and planner say.

    Args:
        policy: whose model plays, and scores both views too.
        games: what it plays, each once.
        plays: makes the player of an episode; ``None`` lets the model play.

    Raises:
        InfrastructureError: every episode failed.
        ConfigError: nothing demonstrates.
    """
    watchers: dict[str, _Watcher] = {}

    def watch(task: str, player: Player, env: GuardedEnv) -> Player:
        watchers[task] = _Watcher(plays(task, player, env) if plays else player, env, make_demonstrator(policy.entry))
        return watchers[task]

    trajectories = games.play(watch)
    gaps = iter(_gaps(policy, trajectories))
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
    return Judgement(tuple(turns), trajectories)


def judge_model(
    settings: WarmStartSettings, entry: EnvironmentEntry, games: int | None = None, demonstrator: float | None = None
) -> Judgement:
    """Judge the model that ``settings.model_path`` names, on the held-out games of a warm start with these settings.

    Args:
        settings: prompts and responses, as in training; device and threads.
        entry: the environment.
        games: how many; ``None`` plays ``settings.evaluation_games``.
        demonstrator: probability of another action than the planned one with which the demonstrator plays, and the model
            scores its turns; ``None`` lets the model play.

    Raises:
        CheckpointError, ChatTemplateError: ``model_path`` holds no causal LM with a usable tokenizer.
        InfrastructureError: every episode failed.
        ConfigError: nothing demonstrates, or ``device`` is ``cuda`` without a CUDA device.
    """
    # Action noise would carry out another action than the response says.
    noise: dict[str, Any] = (
        {} if demonstrator is None else {"suboptimal_probability": demonstrator, "action_noise": 0.0}
    )
    settings = replace(replace(settings, **noise), evaluation_games=games or settings.evaluation_games)

    def play() -> Judgement:
        with computing_with(settings):
            policy = load_policy(settings, entry)

            def demonstrate(task: str, player: Player, env: GuardedEnv) -> Player:
                random = np.random.default_rng([derive_seed(settings.seed, task)])
                return DemonstratorPlayer(policy, make_demonstrator(entry), random, env.walkthrough)

            with HeldOutGames(policy, EVALUATED) as held_out:
                return judge(policy, held_out, demonstrate if noise else None)

    return outside_loop(play)


@dataclass(slots=True)
class _Watcher:
    """A policy's player whose demonstrator and planner look at every turn and decide nothing."""

    player: Player
    env: GuardedEnv
    demonstrator: Demonstrator
    remaining: list[int | None] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)

    async def act(self, result: StepResult, history: History, step: int) -> Turn | None:
        """The policy's action; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            begin(self.demonstrator, result.task, result.observation, 0, self.env.walkthrough)
        _, planned = plan(self.demonstrator, result.observation, result.admissible_actions)
        self.remaining.append(self.env.commands_to_win())  # also before a turn that the prompt limit prevents
        turn = await self.player.act(result, history, step)
        if turn is not None:
            self.planned.append(turn.action in planned)
            self.demonstrator.carried_out(turn.action)
        return turn

    def decisive(self, trajectory: Trajectory) -> Iterator[bool | None]:
        """For each turn, whether it shortened the plan; not known of the last one of a game that ended without being won."""
        remaining = [*self.remaining, 0 if trajectory.success else None]
        for index in range(len(trajectory.turns)):
            before, then = remaining[index : index + 2]
            yield None if before is None or then is None else then < before


def _gaps(policy: Policy, trajectories: Sequence[Trajectory]) -> list[float]:
    """Mean signed gap of every turn."""
    shown = [
        (turn, Evidence(ids, turn.insert_at))
        for trajectory in trajectories
        for turn, ids in zip(trajectory.turns, outcome_evidence(trajectory, policy.tokenizer), strict=True)
    ]
    views = {"ordinary": [scored_turn(turn) for turn, _ in shown], "hindsight": [scored_turn(*each) for each in shown]}
    scores, _ = score_views(policy.model, views, max_tokens=MAX_TOKENS)
    gap = hindsight_gap(scores["hindsight"], scores["ordinary"], GAP_CLIP)
    return [float(each.mean()) for each in gap.split([len(turn.response_ids) for turn, _ in shown])]


def _auc(turns: Sequence[JudgedTurn], name: str) -> tuple[float, float, float] | None:
    """Area under the curve of the gap, sign reversed, as a detector of turns that are not ``name``, where that is known; with a
    95 % interval over resampled episodes.

    ``None`` if all turns are of one kind.
    """
    known = [turn for turn in turns if getattr(turn, name) is not None]
    labels = np.array([not getattr(turn, name) for turn in known], dtype=bool)
    gaps, episodes = np.array([turn.gap for turn in known]), np.array([turn.episode for turn in known])
    area = auc(-gaps, labels)
    if area is None:
        return None
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
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    return float((rankdata(scores)[positive].sum() - count * (count + 1) / 2) / (count * others))
