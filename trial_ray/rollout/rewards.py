"""Custom rewards: a user function that is called with each episode that was played to its end."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_ray.adapters.guarded import ContractError, first_line, named_rewards
from trial_ray.config.training import reward_name
from trial_ray.errors import RewardError

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings
    from trial_ray.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """The user's reward function.

    Attributes:
        function: takes the episode (``callbacks.TextEpisode``); returns a number, or numbers by name, or an awaitable of
            them.
        weights: weights of the named numbers; 1 for names without a weight.
        timeout_s: time limit of a call in seconds.
    """

    function: Callable[[Trajectory], Any]
    weights: Mapping[str, float]
    timeout_s: float

    @classmethod
    def of(cls, config: RunSettings) -> RewardFunction | None:
        """Return the reward function of a config; ``None`` if its reward is a string."""
        reward = config.reward
        return None if isinstance(reward, str) else cls(reward, config.reward_weights, config.reward_timeout_s)

    async def rate(self, episode: Trajectory) -> None:
        """Store the reward and its named parts in the episode.

        Raises:
            RewardError: the function raised, did not return in time, or returned something other than finite numbers.
        """
        name = reward_name(self.function)
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                answer = await self._answer(episode)
            parts = named_rewards(answer if isinstance(answer, Mapping) else {name: answer}, "the answer")
            if unknown := self.weights.keys() - parts.keys():
                raise ContractError(
                    f"reward_weights names {', '.join(sorted(unknown))}; the reward function returned {', '.join(parts) or 'none'}"
                )
            if changed := [part for part, value in parts.items() if episode.rewards.get(part, value) != value]:
                raise ContractError(
                    f"the environment has another reward named {', '.join(changed)}; name the part differently"
                )
            total = sum(self.weights.get(part, 1.0) * value for part, value in parts.items())
            episode.rewards |= {**parts, **named_rewards({name: total}, "the weighted sum")}
            episode.function_reward = float(total)
        except (Exception, SystemExit) as error:
            cause = str(error) if isinstance(error, ContractError) else first_line(error)
            if deadline.expired():
                cause = f"no answer within {self.timeout_s:g} s"
            message = f"reward function {name}, {episode.environment}, task {episode.task_id!r}: {cause}"
            logger.warning(message, exc_info=error)
            raise RewardError(message) from error

    async def _answer(self, episode: Trajectory) -> Any:
        """Call the function in a thread, so other episodes continue, and return its result."""
        returned: Future[Any] = Future()
        returned.set_running_or_notify_cancel()
        # A daemon thread, unlike the threads of an executor, does not keep the process alive if the function hangs.
        threading.Thread(target=lambda: returned.set_result(self._result(episode)), daemon=True).start()
        answer = await asyncio.wrap_future(returned)
        if isinstance(answer, BaseException):
            raise answer
        return await answer if inspect.isawaitable(answer) else answer

    def _result(self, episode: Trajectory) -> Any | Awaitable[Any] | BaseException:
        """Return the function's result, or what it raised: a future does not accept every exception."""
        try:
            return self.function(episode)
        except BaseException as error:
            return error
