"""User code on an env runner: RLlib's callbacks for environments, episodes and samples, and the reward function."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.adapters.guarded import ContractError, GuardedEnv, StepResult, first_line, named_rewards
from trial_ray.adapters.processes import ProcessEnv
from trial_ray.config.training import TOTAL, reward_name
from trial_ray.errors import CallbackError, RewardError
from trial_ray.files import Record
from trial_ray.prompts.writer import ResponseTexts
from trial_ray.trajectory import Trajectory

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardFunction:
    """The user's reward functions, usually one.

    Attributes:
        functions: reward functions, which take a :class:`TextEpisode` and return a number or an awaitable of a number; if there
            is only one function, it may also return a dict of named numbers.
        weights: weight of each number in the sum, by the name of the number or of its function; a missing weight is 1.
        timeout_s: time limit of a call in seconds.
        total: name of the weighted sum in the episode's rewards.
    """

    functions: Sequence[Callable[[Trajectory], Any]]
    weights: Mapping[str, float]
    timeout_s: float
    total: str

    @classmethod
    def of(cls, config: RunSettings) -> RewardFunction | None:
        """Return the reward functions of a config; ``None`` if its ``reward`` is a string, not a function."""
        reward, further = config.reward, (config.reward_weights, config.reward_timeout_s)
        if isinstance(reward, str):
            return None
        return (
            cls(reward, *further, TOTAL) if isinstance(reward, list) else cls([reward], *further, reward_name(reward))
        )

    async def rate(self, episode: Trajectory) -> None:
        """Call the reward functions, and store their weighted sum and their named numbers in the episode.

        Raises:
            RewardError: a function raised, did not return in time, or returned something other than finite numbers; or a name in
                ``weights`` is unknown, or the environment has another reward of the same name.
        """
        returned = await asyncio.gather(*(self._parts(function, episode) for function in self.functions))
        parts = {name: value for rewards in returned for name, value in rewards.items()}
        with _reported(", ".join(map(reward_name, self.functions)), episode):
            if unknown := self.weights.keys() - parts.keys():
                raise ContractError(
                    f"reward_weights names {', '.join(sorted(unknown))}; the reward function returned {', '.join(parts) or 'none'}"
                )
            if changed := [part for part, value in parts.items() if episode.rewards.get(part, value) != value]:
                raise ContractError(
                    f"the environment has another reward named {', '.join(changed)}; name the part differently"
                )
            total = sum(self.weights.get(part, 1.0) * value for part, value in parts.items())
            episode.rewards |= {**parts, **named_rewards({self.total: total}, "the weighted sum")}
            episode.function_reward = float(total)

    async def _parts(self, function: Callable[[Trajectory], Any], episode: Trajectory) -> dict[str, float]:
        """Return a function's rewards by name; raises the same errors as :meth:`rate`."""
        name = reward_name(function)
        with _reported(name, episode):
            try:
                async with asyncio.timeout(self.timeout_s) as deadline:
                    answer = await self._answer(function, episode)
            except TimeoutError as error:
                if deadline.expired():
                    raise ContractError(f"no answer within {self.timeout_s:g} s") from error
                raise
            if answer is None:
                raise ContractError("it returned None, expected a number; end it with a return statement")
            several = isinstance(answer, Mapping) and len(self.functions) == 1
            return named_rewards(answer if several else {name: answer}, "the answer")

    async def _answer(self, function: Callable[[Trajectory], Any], episode: Trajectory) -> Any:
        """Call a function in a thread, so other episodes continue, and return its result."""
        returned: Future[Any] = Future()
        returned.set_running_or_notify_cancel()
        # A daemon thread, unlike the threads of an executor, does not keep the process alive if the function hangs.
        threading.Thread(target=lambda: returned.set_result(_result(function, episode)), daemon=True).start()
        answer = await asyncio.wrap_future(returned)
        if isinstance(answer, BaseException):
            raise answer
        return await answer if inspect.isawaitable(answer) else answer


def _result(function: Callable[[Trajectory], Any], episode: Trajectory) -> Any | Awaitable[Any] | BaseException:
    """Return the function's result, or the exception that it raised, because futures do not accept every exception."""
    try:
        return function(episode)
    except BaseException as error:
        return error


@contextmanager
def _reported(name: str, episode: Trajectory) -> Iterator[None]:
    """Log and re-raise errors as a :class:`RewardError` that names the function and the task."""
    try:
        yield
    except (Exception, SystemExit) as error:
        cause = str(error) if isinstance(error, ContractError) else first_line(error)
        message = f"reward function {name}, {episode.environment}, task {episode.task_id!r}: {cause}"
        logger.warning(message, exc_info=error)
        raise RewardError(message) from error


RUNNER_HOOKS = (
    "on_environment_created",
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_sample_end",
)
"""Methods of RLlib's callback class (hooks) that are called on env runners."""
NEVER_CALLED = {
    "on_evaluate_offline_start": "nothing is evaluated offline",
    "on_evaluate_offline_end": "nothing is evaluated offline",
    "on_offline_eval_runners_recreated": "nothing is evaluated offline",
    "on_sub_environment_created": "it is of RLlib's old API stack; on_environment_created is called",
    "on_postprocess_trajectory": "it is of RLlib's old API stack; on_sample_end is called",
    "on_create_policy": "it is of RLlib's old API stack",
    "on_learn_on_batch": "it is of RLlib's old API stack",
}
"""RLlib's hooks that this package never calls, with the reason."""


def hooks_of(callbacks: Iterable[Any], config: Any, names: Iterable[str]) -> dict[str, list[Callable[..., None]]]:
    """Return the user's callbacks by hook name, in the order in which RLlib calls them; hooks without a callback are omitted.

    Args:
        callbacks: instances of the user's callback classes.
        config: config with the user's functions in its ``callbacks_*`` attributes.
        names: names of the hooks.
    """
    hooks = {}
    for name in names:
        default = getattr(RLlibCallback, name)
        calls = [
            getattr(instance, name) for instance in callbacks if getattr(type(instance), name, default) is not default
        ]
        calls += force_list(getattr(config, f"callbacks_{name}", None))
        if calls:
            hooks[name] = calls
    return hooks


Indices = int | slice | Sequence[int] | None


@dataclass(slots=True, eq=False)
class TextEpisode(Trajectory):
    """Episode that callbacks receive: its trajectory so far, with the attributes and methods of RLlib's episodes.

    Callbacks may change the episode until its group has ended (``on_sample_end`` is the last call). The changed episode is
    trained on, counted and recorded. Other processes receive it as a plain :class:`Trajectory`.

    Attributes:
        id_: identifier of the episode, unique in the run.
        in_evaluation: whether the episode belongs to an evaluation set.
        max_turns: maximum number of turns; the episode is truncated after them.
        custom_data: data that a callback keeps for this episode.
        now: the environment's current result; ``None`` before the reset.
        infos: ``info`` of the reset and of each turn so far, without entries that JSON cannot represent.
        texts: decoder of prompts and responses.
    """

    t_started: ClassVar[int] = 0
    is_numpy: ClassVar[bool] = False
    agent_id: ClassVar[None] = None
    module_id: ClassVar[str] = DEFAULT_MODULE_ID
    id_: str = field(default_factory=lambda: uuid.uuid4().hex)
    in_evaluation: bool = False
    max_turns: int = 0
    custom_data: dict[Any, Any] = field(default_factory=dict)
    now: StepResult | None = None
    infos: list[Mapping[str, Any]] = field(default_factory=list)
    texts: ResponseTexts | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Trajectory, tuple(getattr(self, attribute.name) for attribute in fields(Trajectory))

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.turns)

    env_steps = agent_steps = __len__

    def __getattr__(self, name: str) -> Any:
        if hasattr(SingleAgentEpisode, name):
            raise AttributeError(
                f"A TextEpisode has no {name} of RLlib's SingleAgentEpisode. Its turns have prompts, responses, log-probabilities "
                "and rewards; docs/rllib.md lists its attributes."
            )
        raise AttributeError(f"A TextEpisode has no attribute {name!r}; docs/rllib.md lists its attributes.")

    @property
    def t(self) -> int:
        """Number of turns so far."""
        return len(self.turns)

    @property
    def task(self) -> str:
        """Description of the task; empty before the reset."""
        return self.now.task if self.now is not None else ""

    @property
    def prompts(self) -> list[str]:
        """Text of each turn's prompt, with the special tokens."""
        assert self.texts is not None  # EpisodeWatch.episode() sets the attribute ``texts``.
        return [self.texts.decode(turn.prompt_ids.tolist()) for turn in self.turns]

    @property
    def responses(self) -> list[str]:
        """Text of each turn's response, from which the action was read."""
        assert self.texts is not None
        return [self.texts.text(turn.prompt_ids, turn.insert_at, turn.response_ids) for turn in self.turns]

    @property
    def is_reset(self) -> bool:
        """True if the episode has started."""
        return self.now is not None

    @property
    def is_terminated(self) -> bool:
        """True if the environment has terminated the episode."""
        return self.now is not None and self.now.terminated

    @property
    def is_truncated(self) -> bool:
        """True if a limit of the environment, or the limit on turns or prompt tokens, has ended the episode."""
        if self.now is None or self.now.terminated:
            return False
        return self.now.truncated or len(self) >= self.max_turns or self.ended in ("turn_limit", "prompt_limit")

    @property
    def is_done(self) -> bool:
        """True if the episode has ended."""
        return self.is_terminated or self.is_truncated

    def get_return(self) -> float:
        """Return the undiscounted sum of the rewards so far."""
        return self.episode_return

    def get_observations(self, indices: Indices = None) -> Any:
        """Return the observation of the reset and of each turn.

        Args:
            indices: an index, a slice or a list of indices, or ``None`` for all.
        """
        observations = [turn.observation for turn in self.turns]
        return _at(observations if self.now is None else [*observations, self.now.observation], indices)

    def get_actions(self, indices: Indices = None) -> Any:
        """Return the actions sent to the environment; ``indices`` as in :meth:`get_observations`."""
        return _at([turn.action for turn in self.turns], indices)

    def get_rewards(self, indices: Indices = None) -> Any:
        """Return the environment's rewards; ``indices`` as in :meth:`get_observations`."""
        return _at([turn.reward for turn in self.turns], indices)

    def get_infos(self, indices: Indices = None) -> Any:
        """Return ``info`` of the reset and of each turn; ``indices`` as in :meth:`get_observations`."""
        return _at(self.infos, indices)


def _at(values: list[Any], indices: Indices) -> Any:
    if indices is None:
        return values
    return values[indices] if isinstance(indices, int | slice) else [values[index] for index in indices]


class RunnerCallbacks:
    """The user's callbacks on one env runner; an instance without callbacks is falsy.

    Many episodes are played at once in a background thread, but callbacks run one at a time, and never while logged metrics
    are collected.

    Args:
        runner: the env runner.
    """

    def __init__(self, runner: EnvRunner) -> None:
        self._runner, config = runner, runner.config
        callbacks = [cls() for cls in force_list(config.callbacks_class) if cls is not RLlibCallback]
        self._hooks = hooks_of(callbacks, config, RUNNER_HOOKS)
        self._numbers: WeakKeyDictionary[GuardedEnv | ProcessEnv, int] = WeakKeyDictionary()
        self._created = 0
        self._lock = threading.RLock()
        # Training and evaluation share the env runners, but their metrics are logged separately.
        self._loggers = [runner.metrics, MetricsLogger(root=False, stats_cls_lookup=config.stats_cls_lookup)]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, hook: str, in_evaluation: bool, **arguments: Any) -> None:
        """Call the callbacks of a hook with RLlib's arguments.

        Raises:
            CallbackError: a callback raised.
        """
        with self._lock:
            for callback in self._hooks.get(hook, ()):
                logger = self._loggers[in_evaluation]
                try:
                    callback(env_runner=self._runner, metrics_logger=logger, **arguments)
                except Exception as error:
                    raise CallbackError(
                        f"The callback {_name(callback, hook)} raised on env runner {self._runner.worker_index}: "
                        f"{type(error).__name__}: {error}"
                    ) from error

    def number(self, env: GuardedEnv | ProcessEnv, user_env: Any, env_config: Record, in_evaluation: bool) -> int:
        """Return the index of an environment in this env runner, from 0; call ``on_environment_created`` for a new environment.

        Args:
            env: the environment.
            user_env: the environment object that callbacks receive.
            env_config: keyword arguments of the environment.
            in_evaluation: whether metrics are logged for an evaluation set instead of training.
        """
        if env not in self._numbers:
            self._numbers[env], self._created = self._created, self._created + 1
            runner = self._runner
            context = EnvContext(dict(env_config), runner.worker_index, num_workers=runner.num_workers)
            self.call("on_environment_created", in_evaluation, env=user_env, env_context=context)
        return self._numbers[env]

    def pop_logged(self, in_evaluation: bool) -> dict[str, Any]:
        """Return and clear the metrics that callbacks have logged, in the form that ``MetricsLogger.aggregate`` expects."""
        with self._lock:
            return self._loggers[in_evaluation].reduce()


def _name(callback: Callable[..., None], hook: str) -> str:
    owner = getattr(callback, "__self__", None)
    name = getattr(callback, "__qualname__", repr(callback))
    return f"{type(owner).__name__}.{hook}" if owner is not None else f"{hook}={name}"


@dataclass
class EpisodeWatch:
    """Calls the user's callbacks and reward function during one episode.

    Attributes:
        callbacks: callbacks of the env runner.
        env: environment of the episode.
        env_config: keyword arguments of the environment.
        in_evaluation: whether the episode belongs to an evaluation set.
        texts: decoder of prompts and responses.
        reward: the user's reward functions; ``None`` without any.
    """

    callbacks: RunnerCallbacks
    env: GuardedEnv | ProcessEnv
    env_config: Record
    in_evaluation: bool
    texts: ResponseTexts
    reward: RewardFunction | None
    _arguments: dict[str, Any] = field(init=False)
    """Arguments that all hooks of the episode receive."""

    def episode(self, **trajectory: Any) -> TextEpisode:
        """Create the episode from the fields of its trajectory."""
        return TextEpisode(
            **trajectory, in_evaluation=self.in_evaluation, max_turns=self.env.max_turns, texts=self.texts
        )

    def create(self, episode: Trajectory, user_env: Any) -> None:
        """Call ``on_episode_created``, after the environment was created and before it is reset.

        Args:
            episode: episode that :meth:`episode` created.
            user_env: the user's environment, or the env runner's proxy of an environment in a separate process.
        """
        user_env = getattr(user_env, "unwrapped", user_env)
        number = self.callbacks.number(self.env, user_env, self.env_config, self.in_evaluation)
        self._arguments = {"env": user_env, "env_index": number, "rl_module": None}
        self.callbacks.call("on_episode_created", self.in_evaluation, episode=episode, **self._arguments)

    def call(self, hook: str, episode: Trajectory, now: StepResult) -> None:
        """Call a hook other than ``on_episode_created``; ``now`` is the environment's current result."""
        assert isinstance(episode, TextEpisode)  # EpisodeWatch.episode() has created the episode.
        if now is not episode.now:
            episode.infos.append(now.info)
        episode.now = now
        arguments = self._arguments | ({"prev_episode_chunks": []} if hook == "on_episode_end" else {})
        self.callbacks.call(hook, self.in_evaluation, episode=episode, **arguments)
