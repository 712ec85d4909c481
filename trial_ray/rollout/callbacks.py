"""A user's callbacks on an env runner: RLlib's hooks around its environments, episodes and samples."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.processes import ProcessEnv
from trial_ray.errors import CallbackError
from trial_ray.rollout.response_texts import ResponseTexts
from trial_ray.rollout.rewards import RewardFunction
from trial_ray.rollout.trajectory import Trajectory

RUNNER_HOOKS = (
    "on_environment_created",
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_sample_end",
)
"""What is called on env runners."""
NEVER_CALLED = {
    "on_evaluate_offline_start": "nothing is evaluated offline",
    "on_evaluate_offline_end": "nothing is evaluated offline",
    "on_offline_eval_runners_recreated": "nothing is evaluated offline",
    "on_sub_environment_created": "it is of RLlib's old API stack; on_environment_created is called",
    "on_postprocess_trajectory": "it is of RLlib's old API stack; on_sample_end is called",
    "on_create_policy": "it is of RLlib's old API stack",
    "on_learn_on_batch": "it is of RLlib's old API stack",
}
"""Hooks that RLlib has and nothing here calls, with the reason."""


def hooks_of(made: Iterable[Any], config: Any, names: Iterable[str]) -> dict[str, list[Callable[..., None]]]:
    """What the user wants to be called, by the names of the hooks, in RLlib's order; hooks that do nothing are left out.

    Args:
        made: the instances of the user's classes.
        config: whose ``callbacks_*`` hold the user's functions.
        names: of the hooks.
    """
    found = {}
    for name in names:
        nothing = getattr(RLlibCallback, name)
        calls = [getattr(each, name) for each in made if getattr(type(each), name, nothing) is not nothing]
        calls += force_list(getattr(config, f"callbacks_{name}", None))
        if calls:
            found[name] = calls
    return found


@dataclass(slots=True, eq=False)
class TextEpisode(Trajectory):
    """The episode that callbacks are given: its trajectory so far, under RLlib's names for episodes, too.

    What a callback changes in it before its group is handed over (``on_sample_end`` is the last call before) is trained on,
    counted and recorded. To another process it travels as its :class:`Trajectory`.

    Attributes:
        id_: unique in the run.
        in_evaluation: whether it is one of an evaluation set.
        max_turns: after which it is cut.
        custom_data: a callback's own, for this episode.
        now: what the environment shows now; ``None`` before it was reset.
        infos: what the environment's ``info`` held that JSON has a form for, the reset's first.
    """

    id_: str = field(default_factory=lambda: uuid.uuid4().hex)
    in_evaluation: bool = False
    max_turns: int = 0
    custom_data: dict[Any, Any] = field(default_factory=dict)
    now: StepResult | None = None
    infos: list[Mapping[str, Any]] = field(default_factory=list)
    texts: ResponseTexts | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Trajectory, tuple(getattr(self, each.name) for each in fields(Trajectory))

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.turns)

    env_steps = agent_steps = __len__

    @property
    def task(self) -> str:
        """What is to be done, in words; empty before the reset."""
        return self.now.task if self.now is not None else ""

    @property
    def prompts(self) -> list[str]:
        """What the policy was shown in each turn, with the special tokens."""
        assert self.texts is not None  # set by the watch
        return [self.texts.decode(turn.prompt_ids.tolist()) for turn in self.turns]

    @property
    def responses(self) -> list[str]:
        """What the policy answered in each turn, as it is read for the action."""
        assert self.texts is not None
        return [self.texts.text(turn.prompt_ids, turn.insert_at, turn.response_ids) for turn in self.turns]

    @property
    def is_reset(self) -> bool:
        """Whether it has started."""
        return self.now is not None

    @property
    def is_terminated(self) -> bool:
        """Whether the environment has ended it."""
        return self.now is not None and self.now.terminated

    @property
    def is_truncated(self) -> bool:
        """Whether a limit on turns or prompt tokens has ended it."""
        if self.now is None or self.now.terminated:
            return False
        return self.now.truncated or len(self) >= self.max_turns or self.ended in ("turn_limit", "prompt_limit")

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.is_terminated or self.is_truncated

    def get_return(self) -> float:
        """Undiscounted sum of the rewards so far."""
        return self.episode_return

    def get_observations(self, indices: int | slice | Sequence[int] | None = None) -> Any:
        """What the environment showed, the reset first: one more than there are turns; all, a slice, or one by its index."""
        shown = [turn.observation for turn in self.turns]
        return _at(shown if self.now is None else [*shown, self.now.observation], indices)

    def get_actions(self, indices: int | slice | Sequence[int] | None = None) -> Any:
        """The actions that were sent to the environment; ``indices`` as above."""
        return _at([turn.action for turn in self.turns], indices)

    def get_rewards(self, indices: int | slice | Sequence[int] | None = None) -> Any:
        """The environment's rewards; ``indices`` as above."""
        return _at([turn.reward for turn in self.turns], indices)

    def get_infos(self, indices: int | slice | Sequence[int] | None = None) -> Any:
        """The environment's ``info``, the reset's first; ``indices`` as above."""
        return _at(self.infos, indices)


def _at(values: list[Any], indices: int | slice | Sequence[int] | None) -> Any:
    if indices is None:
        return values
    return values[indices] if isinstance(indices, int | slice) else [values[index] for index in indices]


class RunnerCallbacks:
    """The user's callbacks on one env runner; false where there are none.

    Many episodes are played at once, in a thread of their own. A callback runs alone: no other one, nor the collection of
    what was logged, runs beside it.

    Args:
        runner: the env runner.
    """

    def __init__(self, runner: EnvRunner) -> None:
        self._runner, config = runner, runner.config
        made = [make() for make in force_list(config.callbacks_class) if make is not RLlibCallback]
        self._hooks = hooks_of(made, config, RUNNER_HOOKS)
        self._numbers: WeakKeyDictionary[GuardedEnv | ProcessEnv, int] = WeakKeyDictionary()
        self._created = 0
        self._alone = threading.RLock()
        # Evaluation sets are played by the same runners as training, and logged apart.
        self._loggers = [runner.metrics, MetricsLogger(root=False, stats_cls_lookup=config.stats_cls_lookup)]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, hook: str, in_evaluation: bool, **arguments: Any) -> None:
        """Call a hook with RLlib's arguments.

        Raises:
            CallbackError: one of the callbacks raised.
        """
        with self._alone:
            for callback in self._hooks.get(hook, ()):
                logger = self._loggers[in_evaluation]
                try:
                    callback(env_runner=self._runner, metrics_logger=logger, **arguments)
                except Exception as error:
                    raise CallbackError(
                        f"The callback {_name(callback, hook)} raised on env runner {self._runner.worker_index}: "
                        f"{type(error).__name__}: {error}"
                    ) from error

    def number(
        self, env: GuardedEnv | ProcessEnv, made: Any, env_config: Mapping[str, Any], in_evaluation: bool
    ) -> int:
        """Which of the env runner's environments this is, counted from 0; ``on_environment_created`` is called for a new one.

        Args:
            env: plays episodes.
            made: as callbacks are given it.
            env_config: its keyword arguments.
            in_evaluation: where what is logged goes.
        """
        if env not in self._numbers:
            self._numbers[env], self._created = self._created, self._created + 1
            runner = self._runner
            context = EnvContext(dict(env_config), runner.worker_index, num_workers=runner.num_workers)
            self.call("on_environment_created", in_evaluation, env=made, env_context=context)
        return self._numbers[env]

    def take_logged(self, in_evaluation: bool) -> dict[str, Any]:
        """What callbacks have logged since the last call, as ``MetricsLogger.aggregate`` takes it."""
        with self._alone:
            logged: dict[str, Any] = self._loggers[in_evaluation].reduce()
        return logged


def _name(callback: Callable[..., None], hook: str) -> str:
    owner = getattr(callback, "__self__", None)
    name = getattr(callback, "__qualname__", repr(callback))
    return f"{type(owner).__name__}.{hook}" if owner is not None else f"{hook}={name}"


@dataclass(slots=True)
class EpisodeWatch:
    """Tells the callbacks of one env runner what happens in one episode.

    Attributes:
        callbacks: of the env runner.
        env: in which it is played.
        env_config: the environment's keyword arguments.
        in_evaluation: whether it is one of an evaluation set.
        texts: ids to text.
        reward: the user's reward function, if any.
    """

    callbacks: RunnerCallbacks
    env: GuardedEnv | ProcessEnv
    env_config: Mapping[str, Any]
    in_evaluation: bool
    texts: ResponseTexts
    reward: RewardFunction | None = None
    _place: dict[str, Any] = field(init=False)
    """Arguments that are the same in every call."""

    def episode(self, **trajectory: Any) -> TextEpisode:
        """The episode, for the fields of its trajectory."""
        return TextEpisode(
            **trajectory, in_evaluation=self.in_evaluation, max_turns=self.env.max_turns, texts=self.texts
        )

    def create(self, episode: Trajectory, made: Any) -> None:
        """The environment is there, and is reset next.

        Args:
            episode: made by :meth:`episode`.
            made: the user's environment, or the env runner's stand-in for one in a process of its own.
        """
        made = getattr(made, "unwrapped", made)
        number = self.callbacks.number(self.env, made, self.env_config, self.in_evaluation)
        self._place = {"env": made, "env_index": number, "rl_module": None}
        self.callbacks.call("on_episode_created", self.in_evaluation, episode=episode, **self._place)

    async def rate(self, episode: Trajectory) -> None:
        """Call the user's reward function, if any, with an episode that has ended; errors as :meth:`RewardFunction.rate`."""
        assert isinstance(episode, TextEpisode)  # made by episode()
        if self.reward is not None:
            await self.reward.rate(episode)

    def tell(self, hook: str, episode: Trajectory, now: StepResult) -> None:
        """Call one of the episode's later hooks, with what the environment shows now."""
        assert isinstance(episode, TextEpisode)  # made by episode()
        if now is not episode.now:
            episode.infos.append(now.info)
        episode.now = now
        more: dict[str, Any] = {"prev_episode_chunks": []} if hook == "on_episode_end" else {}
        self.callbacks.call(hook, self.in_evaluation, episode=episode, **self._place, **more)
