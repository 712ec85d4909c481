"""The episode loop, the player that samples turns from the policy, and the limit on concurrent episodes.

Players decide the turns of an episode; other modules define further players, such as experts. An agent program calls the
policy through a chat API; an episode with a program has a turn for each chat request that the player answers.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from trial_envs.program import ChatCall, refusal_action
from trial_envs.program.calls import TOO_LONG, TURN_LIMIT, RefusedCallError
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.processes import ProcessEnv
from trial_ray.engines.protocol import InvalidRequestError, Response, SamplingParams, check_sampling
from trial_ray.errors import ChatTemplateError, EngineError, EnvironmentFaultError, PromptTooLongError
from trial_ray.files import Json, Record, text_digest
from trial_ray.process import advance
from trial_ray.prompts.writer import Prompt, PromptWriter, located
from trial_ray.trajectory import Ending, Trajectory, Turn

if TYPE_CHECKING:
    from trial_ray.rollout.callbacks import EpisodeWatch


logger = logging.getLogger(__name__)

GIVEN_UP_POLL_S = 1.0
"""Seconds between checks whether an agent program still waits for the answer to its chat request."""
MAX_REPORTED = 20
"""Maximum number of different warnings about a user's agent programs in the log of one process."""
_reported: set[str] = set()


class EpisodeSlots:
    """Limits the concurrent episodes of one event loop; waiting groups get slots in the order of their indices.

    Args:
        number: maximum number of episodes that are played at once, over all groups.

    Attributes:
        free: semaphore of the slots that no episode has; an episode acquires one when it starts and releases it when it ends.
    """

    def __init__(self, number: int) -> None:
        self.free = asyncio.Semaphore(number)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, index: int) -> AsyncIterator[None]:
        """Wait until group ``index`` is first among the waiting groups; inside the context, no other group gets slots."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (index, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the waiting group with the lowest index get slots next."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # A cancelled group no longer waits.
                turn.set_result(None)
                return
        self._is_taken = False


Answer = TypeVar("Answer")
Generate = Callable[[np.ndarray, SamplingParams], Awaitable[Response]]
History = Sequence[Turn]
"""The turns of an episode up to now, oldest first."""


class Player(Protocol):
    """Decides the turns of one episode."""

    async def act(self, result: StepResult, history: History, step: int) -> Turn | None:
        """Decide the next turn.

        Args:
            result: the environment's current result.
            history: the turns so far.
            step: number of this decision, from 1.

        Returns:
            The turn, without the environment's answer; ``None`` to give up, which ends the episode like a limit on turns or,
            in an episode with an agent program, refuses the program's chat request.

        Raises:
            PromptTooLongError: the prompt does not fit; the episode ends, or the agent program's chat request is refused.
            EngineError: the response could not be sampled; the episode fails.
        """
        ...


EpisodeEnv = GuardedEnv | ProcessEnv
"""The environment of an episode; methods of ``ProcessEnv``, whose environment is in a separate process, return awaitables."""


async def play_episode(
    env: EpisodeEnv,
    task_id: str,
    player: Player,
    *,
    env_seed: int = 0,
    seed: int = 0,
    watch: EpisodeWatch | None = None,
) -> Trajectory:
    """Play one episode and return its trajectory.

    An engine or environment error ends the episode as ``failed`` and is stored in ``error``.

    Args:
        env: text environment, which no other episode may use; if it causes an error, its attribute ``faulty`` is set.
        task_id: task to reset to.
        player: decides the turns.
        env_seed: seed of the environment, the same for all rollouts of a group.
        seed: seed of this rollout, which is stored in the trajectory.
        watch: calls the user's reward function and callbacks; ``None`` without either. ``on_episode_end`` is not called for
            failed episodes.

    Raises:
        CallbackError: a callback raised.
    """
    create: Any = Trajectory if watch is None else watch.episode
    trajectory: Trajectory = create(task_id=task_id, family="", seed=seed, environment=env.name)
    try:
        await _play(env, trajectory, player, env_seed, watch)
    except (EngineError, EnvironmentFaultError) as error:
        trajectory.ended, trajectory.error = "failed", f"{type(error).__name__}: {error}"
        trajectory.failed_by = "environment" if isinstance(error, EnvironmentFaultError) else "engine"
        trajectory.calls = getattr(error, "calls", None) or trajectory.calls
    return trajectory


async def _play(
    env: EpisodeEnv, trajectory: Trajectory, player: Player, env_seed: int, watch: EpisodeWatch | None
) -> None:
    if watch is not None:
        watch.create(trajectory, await _resolved(env.make(trajectory.task_id)))
    result = await _resolved(env.reset(trajectory.task_id, env_seed))
    trajectory.family, trajectory.solution = result.family, await _resolved(env.walkthrough())
    trajectory.instruction = result.task
    if watch is not None:
        watch.call("on_episode_start", trajectory, result)
    limit: Ending = "turn_limit"
    while not _is_over(env, trajectory, result):
        step = len(trajectory.turns) + 1
        refusal = refusal_action("The player or the client has given up the call.", TURN_LIMIT)
        try:
            turn = await _decided(env, player, result, trajectory.turns, step)
        except PromptTooLongError as error:
            limit, trajectory.error = "prompt_limit", located(error, env.name, trajectory.task_id, step)
            turn, refusal = None, refusal_action(str(error), TOO_LONG)
        except (ChatTemplateError, RefusedCallError) as error:
            if result.call is None:
                raise
            turn, refusal = None, refusal_action(str(error))
        if result.call is None:
            if turn is None:
                break
            result = await _carry_out(env, trajectory, turn, result)
        else:
            result = await _answer_call(env, trajectory, turn, refusal, result)
            trajectory.calls = result.calls
            if turn is None or not result.answered:
                continue
            limit, trajectory.error = "turn_limit", None
        if watch is not None:
            watch.call("on_episode_step", trajectory, result)
    trajectory.success, trajectory.score = result.won, result.score
    if result.refusal:
        _report(f"{env.name}: a call of the program was refused: {result.refusal}")
    for index, turn in enumerate(trajectory.turns):
        # An agent program may hold several conversations, so the next turn may belong to another conversation.
        if turn.call is not None:
            follower = trajectory.successor(index)
            outcome = result.observation if follower is None else trajectory.turns[follower].observation
            trajectory.turns[index] = replace(turn, outcome=outcome)
    trajectory.ended = "terminated" if result.terminated else limit
    if watch is not None:
        if watch.reward is not None and trajectory.turns:  # A rollout without turns is not trained on.
            await watch.reward.rate(trajectory)
        watch.call("on_episode_end", trajectory, result)


async def _decided(env: EpisodeEnv, player: Player, result: StepResult, history: History, step: int) -> Turn | None:
    """Let ``player`` decide the next turn, and return it.

    The result is ``None`` if the player gives up, or if an agent program stops waiting for the answer to its chat request.
    """
    if result.call is None:
        return await player.act(result, history, step)
    deciding = asyncio.ensure_future(player.act(result, history, step))
    try:
        while not (await asyncio.wait([deciding], timeout=GIVEN_UP_POLL_S))[0]:
            if not await _resolved(env.is_waiting()):
                return None
        return deciding.result()
    finally:
        deciding.cancel()


def _is_over(env: EpisodeEnv, trajectory: Trajectory, result: StepResult, num_steps: int = 0) -> bool:
    """Return whether the episode ends after the turns of the trajectory and ``num_steps`` actions of the current turn."""
    num_steps += sum(turn.num_steps for turn in trajectory.turns)
    return result.terminated or result.truncated or num_steps >= env.max_turns


async def _carry_out(env: EpisodeEnv, trajectory: Trajectory, turn: Turn, before: StepResult) -> StepResult:
    """Carry out a turn's actions until the episode ends, append the turn to the trajectory, and return the last result."""
    result, results = before, list[StepResult]()
    for action, answer in zip(turn.all_actions, turn.answers or (turn.outcome,), strict=True):
        if _is_over(env, trajectory, result, len(results)):
            break
        if answer:  # The policy receives `answer` as the observation, and the environment takes no step.
            result = replace(result, observation=answer, reward=0.0, rewards={}, invalid_action=True)
        else:
            result = await _resolved(env.step(action))
        advance()
        _add_rewards(trajectory, result)
        results.append(result)
    answers = tuple(step.observation for step in results)
    trajectory.turns.append(
        replace(
            turn,
            observation=before.observation,
            admissible_actions=tuple(before.admissible_actions),
            outcome="\n\n".join(answers),
            reward=sum(step.reward for step in results),
            invalid_action=any(step.invalid_action for step in results),
            answers=answers if turn.actions else (),
        )
    )
    return result


async def _answer_call(
    env: EpisodeEnv, trajectory: Trajectory, turn: Turn | None, refusal: str, before: StepResult
) -> StepResult:
    """Answer an agent program's chat request with ``turn``, or refuse it if ``turn`` is ``None``; return the step's result.

    The turn is appended to the trajectory if the program received it.
    """
    result = await _resolved(env.step(refusal if turn is None else turn.action))
    advance()
    _add_rewards(trajectory, result)
    if turn is not None and result.answered:
        trajectory.turns.append(
            replace(
                turn, observation=before.observation, call=before.call, outcome=result.observation, reward=result.reward
            )
        )
    elif trajectory.turns:
        last = trajectory.turns[-1]
        trajectory.turns[-1] = replace(last, reward=last.reward + result.reward)
    return result


def _add_rewards(trajectory: Trajectory, result: StepResult) -> None:
    for name, value in result.rewards.items():
        trajectory.rewards[name] = trajectory.rewards.get(name, 0.0) + value


def _report(message: str) -> None:
    """Log a message once in this process; after :data:`MAX_REPORTED` different messages, no further ones are logged."""
    if message not in _reported and len(_reported) < MAX_REPORTED:
        _reported.add(message)
        logger.warning(message)


async def _resolved(answer: Answer | Awaitable[Answer]) -> Answer:
    return await answer if inspect.isawaitable(answer) else answer


@dataclass(frozen=True)
class PolicyPlayer:
    """Player that samples its turns from a language model.

    Attributes:
        prompts: writes prompts for the policy's tokenizer, and decodes its responses.
        params: sampling parameters; their seed is replaced in every turn if ``seed`` is set.
        generate: coroutine function that samples a response.
        seed: seed of the episode, or ``None`` to sample without seeds.
        program_sampling: whether sampling settings in an agent program's chat request replace those in ``params``
            (``"request"``) or are ignored (``"run"``).
    """

    prompts: PromptWriter
    params: SamplingParams
    generate: Generate
    seed: int | None = None
    program_sampling: Literal["run", "request"] = "run"

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        """Write the prompt, sample the response and read the action; see :class:`Player`."""
        prompt = self.prompts.write(result, history)
        params = self.params if self.seed is None else replace(self.params, seed=derive_seed(self.seed, step))
        if result.call is not None:
            params = self._params(result.call, params)
        response = await self.generate(prompt.ids, params)
        projection = self.prompts.read(prompt, response.response_ids)
        return Turn(
            action=projection.action
            if result.call is None
            else self._answer(result.call, projection.action, prompt, response),
            valid=projection.valid,
            outcome=projection.answer,
            actions=projection.actions,
            answers=projection.answers,
            prompt_ids=prompt.ids,
            response_ids=response.response_ids,
            logprobs=response.logprobs,
            weight_version=response.weight_version,
            temperature=params.temperature,
            insert_at=prompt.insert_at,
            finish_reason=response.finish_reason,
            prompt_cut=prompt.cut,
            reasoning_tokens=self.prompts.responses.reasoning_tokens(
                prompt.ids, prompt.insert_at, response.response_ids
            ),
        )

    def _params(self, call: ChatCall, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters for an agent program's chat request, with the lower of its and the run's token limits."""
        if self.program_sampling == "request":
            params = _requested(call.sampling, params)
        if ignored := sorted({*call.ignored, *(call.sampling if self.program_sampling == "run" else ())}):
            _report(f"Calls of the program have {', '.join(ignored)}, which the settings of the run replace.")
        limit = call.max_tokens
        return replace(params, max_tokens=min(params.max_tokens, limit)) if limit and limit > 0 else params

    def _answer(self, call: ChatCall, action: str, prompt: Prompt, response: Response) -> str:
        """Add the fields that depend on sampled ids, such as ``usage``, to the JSON answer to an agent program's chat request."""
        answer: Json = json.loads(action)
        if response.finish_reason == "length":
            answer["finish_reason"] = "length"
        answer["usage"] = {"prompt_tokens": len(prompt.ids), "completion_tokens": len(response.response_ids)}
        if call.logprobs:
            texts = map(self.prompts.responses.whole, response.response_ids[:, None])  # Decode each token by itself.
            answer["logprobs"] = [
                {"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, response.logprobs, strict=True)
            ]
        return json.dumps(answer)


def _requested(sampling: Record, params: SamplingParams) -> SamplingParams:
    """Return sampling parameters with the sampling settings of an agent program's chat request.

    The request's seed is combined with the rollout's seed; otherwise all rollouts of a group would sample the same answers.

    Raises:
        RefusedCallError: a setting has the wrong type, is out of range, or does not allow training on the answer.
    """
    stop = sampling.get("stop", params.stop)
    seed = (
        params.seed
        if params.seed is None or "seed" not in sampling
        else derive_seed(params.seed, str(sampling["seed"]))
    )
    changes = {name: sampling.get(name, getattr(params, name)) for name in ("temperature", "top_p")}
    params = replace(params, **changes, seed=seed, stop=tuple(stop) if isinstance(stop, list | tuple) else (stop,))
    try:
        check_sampling(params)
    except InvalidRequestError as error:
        raise RefusedCallError(str(error)) from error
    if params.temperature == 0 or params.top_p < 1:
        raise RefusedCallError(
            f"The request has temperature={params.temperature:g} and top_p={params.top_p:g}, with which no answer can be trained "
            'on. With program_sampling="request", a call needs a temperature above 0 and a top_p of 1; program_sampling="run" '
            "replaces both."
        )
    return params


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**31) that depends only on the parts: the same on every machine and in every process."""
    return int.from_bytes(text_digest("/".join(map(str, parts)))[:4], "big") & 0x7FFF_FFFF
