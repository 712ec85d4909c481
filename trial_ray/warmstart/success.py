"""Success of a cloned policy, and the display of its progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel

from trial_ray.engines.local import LocalEngine
from trial_ray.engines.protocol import SamplingParams
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import InfrastructureError
from trial_ray.evaluation.statistics import wilson_interval
from trial_ray.rollout.env_runner import run_quietly
from trial_ray.rollout.episode import Player, PolicyPlayer, derive_seed, play_episode
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.warmstart.settings import WarmStartSettings
from trial_ray.warmstart.tasks import task_set

_log = logging.getLogger(__name__)

Watch = Callable[[str, Player, GuardedEnv], Player]
IN_FLIGHT = 64
"""Episodes in play at the same time."""


@dataclass(frozen=True, slots=True)
class PlayResult:
    """Result of an evaluation.

    Attributes:
        successes: episodes won.
        episodes: episodes played, one a task, without those that failed.
        invalid_share: share of turns whose action the environment did not understand.
    """

    successes: int
    episodes: int
    invalid_share: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> PlayResult:
        """The result of these episodes."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        won = sum(trajectory.success for trajectory in trajectories)
        invalid = sum(turn.invalid_action for turn in turns) / len(turns) if turns else 0.0
        return cls(won, len(trajectories), invalid)

    @property
    def success_rate(self) -> float:
        """Share of episodes won."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.episodes)


class HeldOutGames:
    """Tasks of one purpose, whose environments stay loaded so that they can be played again and again; a context manager.

    Args:
        settings: limits of prompts and responses, form of responses.
        entry: the environment.
        purpose: which tasks, see :mod:`trial_ray.warmstart.tasks`.
        games: how many.
        tokenizer: decodes responses.
        builder: writes prompts, exactly as rollouts do.
    """

    def __init__(
        self,
        settings: WarmStartSettings,
        entry: EnvironmentEntry,
        purpose: int,
        games: int,
        tokenizer: Any,
        builder: PromptBuilder,
    ) -> None:
        self._params = SamplingParams(settings.max_response_tokens)
        self._tokenizer = tokenizer
        self._builder = builder
        played = task_set(settings, entry, purpose, games)
        self._tasks = played.tasks
        self._entry = played.entry
        self._envs = [GuardedEnv(played.entry) for _ in range(min(games, IN_FLIGHT))]

    def __enter__(self) -> HeldOutGames:
        """Return the games themselves."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def play(self, model: PreTrainedModel, seed: int) -> PlayResult:
        """Play each task once; arguments and errors as :meth:`trajectories`."""
        return PlayResult.of(self.trajectories(model, seed))

    def trajectories(self, model: PreTrainedModel, seed: int, watch: Watch | None = None) -> Sequence[Trajectory]:
        """Play each task once; same model, seed and threads, same trajectories, one a task that did not fail.

        Args:
            model: the policy.
            seed: of the responses.
            watch: makes the player of one episode from its task, the policy's player and the environment that it plays in.

        Raises:
            InfrastructureError: environment or engine failed in every episode; in some of them, a warning says so.
        """
        training = model.training
        model.eval()
        engine = LocalEngine(model, frozenset([self._tokenizer.eos_token_id]))
        with asyncio.Runner() as loop:
            trajectories = run_quietly(loop, self._play_all(engine, seed, watch))
        model.train(training)
        ended = [trajectory for trajectory in trajectories if not trajectory.failed]
        if len(ended) < len(trajectories):
            first = next(trajectory.error for trajectory in trajectories if trajectory.failed)
            told = f"{len(trajectories) - len(ended)} of {len(trajectories)} held-out games failed; the first: {first}"
            if not ended:
                raise InfrastructureError(told)
            _log.warning("%s. They are not counted.", told)
        return ended

    async def _play_all(self, engine: LocalEngine, seed: int, watch: Watch | None) -> Sequence[Trajectory]:
        free = list(self._envs)
        slots = asyncio.Semaphore(len(free))

        async def play(task: str) -> Trajectory:
            async with slots:
                env = free.pop()
                player: Player = PolicyPlayer(
                    self._builder, self._decode, self._params, engine.generate, derive_seed(seed, task)
                )
                if watch is not None:
                    player = watch(task, player, env)
                trajectory = await play_episode(env, task, player)
                if env.faulty:
                    env.close()
                    self._envs[self._envs.index(env)] = env = GuardedEnv(self._entry)
                free.append(env)
                return trajectory

        return await asyncio.gather(*(play(task) for task in self._tasks))

    def _decode(self, ids: Any) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


LINE_EVERY = 100
"""Updates between lines of a log, where no bar can move."""


class WarmStartProgress:
    """A progress bar a stage: games played by the oracle, updates; in a log, lines. A context manager."""

    def __init__(self, settings: WarmStartSettings, enabled: bool) -> None:
        self._settings = settings
        self._success = ""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            disable=not enabled,
            # What libraries print goes where stdout goes, which may be a file; rich would draw it above the bars.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._collecting = self._bars.add_task("Demonstrations (games)", total=settings.games, state="")
        self._cloning = self._bars.add_task("Cloning (updates)", total=settings.max_steps, start=False, state="")

    def __enter__(self) -> WarmStartProgress:
        """Show the bars."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the bars as they are."""
        self._bars.stop()

    def game(self) -> None:
        """The oracle finished a game."""
        self._bars.advance(self._collecting)

    def demonstrated(self) -> None:
        """All games are played, now or by an earlier warm start that was interrupted."""
        self._bars.update(self._collecting, completed=self._settings.games)

    def update(self, step: int, loss: float) -> None:
        """An update was done."""
        if step == 1:
            self._bars.start_task(self._cloning)
        state = f"loss {loss:.2f}{self._success}"
        self._bars.update(self._cloning, completed=step, state=state)
        if step % LINE_EVERY == 0 and not (self._bars.disable or self._bars.console.is_terminal):
            self._bars.console.print(f"Cloning: update {step} of {self._settings.max_steps}, {state}", highlight=False)

    def check(self, result: PlayResult) -> None:
        """A check was played."""
        self._success = f" · held-out success {result.success_rate:.0%} (stops at {self._settings.target_success:.0%})"
