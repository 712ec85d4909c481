"""Measures whether a model's hindsight log-ratio (TRIAL paper, Eq. 4) distinguishes planned actions from wasted ones.

The hindsight log-ratio is the change of a response's log-probability when the prompt also contains the outcome of the action.
The model plays held-out games before training. Each action gets two labels that the model does not receive: planned if the expert
could have chosen it, else wasted; and decisive if the environment's planner needs fewer actions after it than before, else
routine. If the hindsight log-ratio does not separate these kinds of actions, turn weights based on it are not useful.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.stats import rankdata

from trial_ray.adapters.adapter import Demonstrator, begin, plan
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.evaluation.local_games import LocalGames, WrapPlayer
from trial_ray.files import Json
from trial_ray.learner.rows import scored_turn
from trial_ray.models.layout import score_views
from trial_ray.objectives.allocation import hindsight_gap
from trial_ray.process import run_outside_event_loop
from trial_ray.rollout.episode import History, Player, derive_seed
from trial_ray.trajectory import Trajectory, Turn
from trial_ray.warmstart.demonstrations import DemonstratorPlayer, outcome_contexts
from trial_ray.warmstart.policy import Policy, held_out_games, load_policy, make_demonstrator, set_threads
from trial_ray.warmstart.settings import EVALUATED, WarmStartSettings

GAP_CLIP = 2.0
"""Clipping bound c of the hindsight log-ratio (TRIAL paper, Eq. 4), in nats; TRIAL's default."""
RESAMPLES = 1000
MAX_TOKENS = 16_384
"""Maximum number of tokens that are scored in one forward pass."""


@dataclass(frozen=True)
class ScoredTurn:
    """One turn of the policy, with its hindsight log-ratio.

    Attributes:
        episode: index of the episode.
        action: action of the turn.
        planned: True if the action is among those from which the expert would have chosen.
        decisive: True if the environment's planner needs fewer actions after the turn; ``None`` without a planner or a plan.
        gap: mean over the response's tokens of the signed, clipped hindsight log-ratio (TRIAL paper, Eq. 4), in nats; positive
            if the outcome confirms the action.
    """

    episode: int
    action: str
    planned: bool
    decisive: bool | None
    gap: float


@dataclass(frozen=True)
class Agreement:
    """Agreement of a model's hindsight log-ratio with the expert and the planner in held-out games.

    Attributes:
        turns: scored turns, in the order of games and turns.
        trajectories: trajectories of the games.
    """

    turns: tuple[ScoredTurn, ...]
    trajectories: list[Trajectory]

    @cached_property
    def figures(self) -> Json:
        """Numbers of games, wins and turns, and for planned, wasted, decisive and routine turns the mean hindsight log-ratio.

        The areas under the ROC curve (with 95 % intervals) are those of the log-ratio as a detector of wasted and of routine turns.
        """
        return {
            "games": len(self.trajectories),
            "won": sum(trajectory.success for trajectory in self.trajectories),
            "turns": len(self.turns),
            "planned": self._kind("planned", True),
            "wasted": self._kind("planned", False),
            "decisive": self._kind("decisive", True),
            "routine": self._kind("decisive", False),
            "auc_wasted": _auc_interval(self.turns, "planned"),
            "auc_routine": _auc_interval(self.turns, "decisive"),
        }

    def to_dict(self) -> Json:
        """Return :attr:`figures` and all turns, for JSON."""
        return {**self.figures, "of_turns": [asdict(turn) for turn in self.turns]}

    def _kind(self, name: str, value: bool) -> dict[str, float | int | None]:
        gaps = [turn.gap for turn in self.turns if getattr(turn, name) is value]
        return {"turns": len(gaps), "gap": float(np.mean(gaps)) if gaps else None}

    def __str__(self) -> str:
        """Return a summary in one sentence."""
        gaps = [self.figures[kind]["gap"] for kind in ("planned", "wasted")]
        planned, wasted = ("unknown" if gap is None else f"{gap:+.2f} nats a token" for gap in gaps)
        auc = self.figures["auc_wasted"]
        area = "unknown" if auc is None else f"{auc[0]:.2f} [{auc[1]:.2f}, {auc[2]:.2f}]"
        return (
            f"Hindsight log-ratio: {planned} for planned actions, {wasted} for wasted ones; "
            f"area under the curve as a detector of wasted turns {area}"
        )


def measure_agreement(
    settings: WarmStartSettings, entry: EnvironmentEntry, games: int | None = None, demonstrator: float | None = None
) -> Agreement:
    """Measure the agreement of the model at ``settings.model_path`` on the held-out games of a warm start with these settings.

    Args:
        settings: settings of prompts and responses, as in training, and device and threads.
        entry: the environment.
        games: number of games, or ``None`` for ``settings.evaluation_games``.
        demonstrator: ``None`` if the model plays. Otherwise, the expert plays, the model only scores the expert's turns, and
            this is the probability of an action other than the planned one.

    Raises:
        CheckpointError, ChatTemplateError: ``model_path`` does not contain a causal LM with a usable tokenizer.
        InfrastructureError: every episode failed.
        ConfigError: the adapter has no expert and the environment lists no actions, or ``device`` is ``cuda`` without a CUDA
            device.
    """
    settings = replace(settings, evaluation_games=games or settings.evaluation_games)
    if demonstrator is not None:
        # Action noise would execute another action than the response contains.
        settings = replace(settings, suboptimal_probability=demonstrator, action_noise=0.0)

    def measure() -> Agreement:
        with set_threads(settings):
            policy = load_policy(settings, entry)

            def demonstrate(task: str, player: Player, env: GuardedEnv) -> Player:
                random = np.random.default_rng([derive_seed(settings.seed, task)])
                return DemonstratorPlayer(policy, make_demonstrator(entry), random, env.walkthrough)

            with held_out_games(policy, EVALUATED) as held_out:
                return compare_with_expert(policy, held_out, None if demonstrator is None else demonstrate)

    return run_outside_event_loop(measure)


def compare_with_expert(policy: Policy, games: LocalGames, wrap: WrapPlayer | None = None) -> Agreement:
    """Play held-out games, and compare each turn's hindsight log-ratio with the decisions of the expert and the planner.

    Args:
        policy: policy with the model that plays, and that scores each turn with and without teacher context.
        games: held-out games; each game is played once.
        wrap: function that returns the player of an episode, or ``None`` if the model plays.

    Raises:
        InfrastructureError: every episode failed.
        ConfigError: the adapter has no expert and the environment lists no actions.
    """
    watchers: dict[str, _Watcher] = {}

    def watch(task: str, player: Player, env: GuardedEnv) -> Player:
        watchers[task] = _Watcher(wrap(task, player, env) if wrap else player, env, make_demonstrator(policy.entry))
        return watchers[task]

    trajectories = games.play(watch)
    gaps = iter(mean_gaps(policy, trajectories))
    turns = []
    for index, trajectory in enumerate(trajectories):
        watcher = watchers[trajectory.task_id]
        facts = zip(trajectory.turns, watcher.planned, watcher.decisive(trajectory), strict=True)
        turns += [ScoredTurn(index, turn.action, planned, decisive, next(gaps)) for turn, planned, decisive in facts]
    return Agreement(tuple(turns), trajectories)


@dataclass
class _Watcher:
    """Wraps a player; records which actions the expert could have chosen, and the lengths of the environment planner's plans."""

    player: Player
    env: GuardedEnv
    demonstrator: Demonstrator
    remaining: list[int | None] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)

    async def act(self, result: StepResult, history: History, step: int) -> Turn | None:
        """Return the next turn of the wrapped player; see :class:`~trial_ray.rollout.episode.Player`."""
        if step == 1:
            begin(self.demonstrator, result.task, result.observation, 0, self.env.walkthrough)
        _, planned = plan(self.demonstrator, result.observation, result.admissible_actions)
        # Append the length of the planner's plan even if the player then returns no turn because of the prompt limit.
        self.remaining.append(self.env.commands_to_win())
        turn = await self.player.act(result, history, step)
        if turn is not None:
            self.planned.append(turn.action in planned)
            for action in turn.all_actions:
                self.demonstrator.carried_out(action)
        return turn

    def decisive(self, trajectory: Trajectory) -> Iterator[bool | None]:
        """Yield for each turn whether it shortened the planner's plan; ``None`` without a plan before or after the turn."""
        remaining = [*self.remaining, 0 if trajectory.success else None]
        for index in range(len(trajectory.turns)):
            before, after = remaining[index : index + 2]
            yield None if before is None or after is None else after < before


def mean_gaps(policy: Policy, trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the hindsight log-ratio (TRIAL paper, Eq. 4) of each turn, averaged over the response's tokens, in nats."""
    turns = [
        replace(turn, temperature=1.0, teacher_context=context)
        for trajectory in trajectories
        for turn, context in zip(trajectory.turns, outcome_contexts(trajectory, policy.tokenizer), strict=True)
    ]
    views = {
        "ordinary": [scored_turn(turn) for turn in turns],
        "hindsight": [scored_turn(turn, hindsight=True) for turn in turns],
    }
    scores, _ = score_views(policy.model, views, max_tokens=MAX_TOKENS)
    gap = hindsight_gap(scores["hindsight"], scores["ordinary"], GAP_CLIP)
    return [float(turn_gap.mean()) for turn_gap in gap.split([len(turn.response_ids) for turn in turns])]


def _auc_interval(turns: Sequence[ScoredTurn], name: str) -> tuple[float, float, float] | None:
    """Return the area under the ROC curve of −(hindsight log-ratio), and the ends of its 95 % interval over resampled episodes.

    ``name`` is an attribute of :class:`ScoredTurn`: turns whose attribute is False are positives, turns whose attribute is True
    are negatives, and ``None`` is ignored. Returns ``None`` if there are no positives or no negatives.
    """
    known = [turn for turn in turns if getattr(turn, name) is not None]
    labels = np.array([not getattr(turn, name) for turn in known], dtype=bool)
    gaps, episodes = np.array([turn.gap for turn in known]), np.array([turn.episode for turn in known])
    area = auc(-gaps, labels)
    if area is None:
        return None
    rows = [np.flatnonzero(episodes == episode) for episode in np.unique(episodes)]
    random = np.random.default_rng(0)
    areas = []
    for _ in range(RESAMPLES):
        drawn = np.concatenate([rows[index] for index in random.integers(len(rows), size=len(rows))])
        areas.append(auc(-gaps[drawn], labels[drawn]))
    low, high = np.quantile([resampled for resampled in areas if resampled is not None], [0.025, 0.975])
    return area, float(low), float(high)


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve: the probability that a positive has a higher score than a negative.

    Ties count as half. Returns ``None`` if there are no positives or no negatives.

    Args:
        scores: float ``[N]``, scores of the examples.
        positive: bool ``[N]``, whether the examples are positives.
    """
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return None
    rank_sum = rankdata(scores)[positive].sum()
    return float((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))
