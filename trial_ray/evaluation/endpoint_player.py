"""Plays an evaluation set with a model behind a chat endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from trial_ray.config.run import RunSettings
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.environments.templates import ConversationPrompt, PromptContext, PromptTemplate
from trial_ray.errors import EnvironmentFaultError, InfrastructureError
from trial_ray.evaluation.endpoint import ChatAnswer, ChatEndpoint, Message
from trial_ray.evaluation.panels import Panel
from trial_ray.evaluation.player import prompt_protocol
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.rollout.episode import Decision, History, derive_seed, play_episode
from trial_ray.rollout.prompts import records
from trial_ray.rollout.trajectory import EpisodeResult

Answer = Callable[[list[Message], Mapping[str, Any]], Awaitable[ChatAnswer]]


class EndpointPlayer:
    """Plays one episode through chat messages of the texts that a trained policy is shown.

    The endpoint counts and cuts no tokens as the trainer does: prompts over ``max_prompt_tokens`` are sent whole, and counted.

    Args:
        template: writes the messages and reads the responses.
        config: sampling and history.
        seed: of the episode.
        answer: sends a conversation.
    """

    def __init__(self, template: PromptTemplate, config: RunSettings, seed: int, answer: Answer) -> None:
        self._template = template
        self._config = config
        self._seed = seed
        self._answer = answer
        self._conversation: list[Message] = []
        self.num_long_prompts = 0
        """Prompts of more than ``max_prompt_tokens`` by the endpoint's count."""

    async def act(self, result: StepResult, history: History, step: int) -> Decision:
        """Send the messages of the turn and read the action; see :class:`~trial_ray.rollout.episode.Player`."""
        config, template = self._config, self._template
        sampling = {
            "temperature": config.evaluation_temperature,
            "top_p": config.evaluation_top_p if config.evaluation_temperature else None,
            "max_tokens": config.max_response_tokens,
            "seed": derive_seed(self._seed, step),
            # A field that vLLM and SGLang read; other endpoints may refuse it.
            "chat_template_kwargs": dict(config.chat_template_kwargs) or None,
        }
        answer = await self._answer(self._messages(result, history, step), sampling)
        self._conversation.append({"role": "assistant", "content": answer.text})
        self.num_long_prompts += answer.prompt_tokens > config.max_prompt_tokens
        projection = template.project(answer.text)
        return Decision(projection.action, projection.valid, finish_reason=answer.finish_reason)

    def _messages(self, result: StepResult, history: History, step: int) -> list[Message]:
        template, window = self._template, self._config.history_window
        conversation = self._config.prompt_style == "conversation"
        past = [] if conversation or not window else records(history)[-window:]
        context = PromptContext(result.task, result.observation.strip(), result.admissible_actions, tuple(past), step)
        message = {"role": "user", "content": template.render(context).strip()}
        if not conversation:
            return [message]
        if not self._conversation:
            system = cast(ConversationPrompt, template).system(result.task).strip()
            self._conversation.append({"role": "system", "content": system})
        self._conversation.append(message)
        return list(self._conversation)


def endpoint_protocol(
    config: RunSettings, panel: Panel, entry: EnvironmentEntry, endpoint: ChatEndpoint
) -> dict[str, Any]:
    """The protocol of a checkpoint's evaluation, so that both stand in one table; with fields that ``--body`` added."""
    return {**prompt_protocol(config, panel, entry), **({"request": dict(endpoint.body)} if endpoint.body else {})}


def evaluate_endpoint(
    panel: Panel,
    entry: EnvironmentEntry,
    config: RunSettings,
    endpoint: ChatEndpoint,
    games: int,
    known: Mapping[str, EpisodeResult] | None = None,
    on_episode: Callable[[EpisodeResult], None] = lambda episode: None,
    warn: Callable[[str], None] = lambda text: None,
) -> EvaluationResult:
    """Play every task of an evaluation set that is not in ``known``, several games at once.

    Args:
        panel: the tasks.
        entry: the environment.
        config: prompt style, sampling and limits.
        endpoint: answers.
        games: how many are played at once, at least 1.
        known: episodes by task that need not be played.
        on_episode: called with every episode as it ends, in any order.
        warn: called with what a reader of the result should know.

    Raises:
        UserInputError: the endpoint refuses requests.
        InfrastructureError: episodes failed on every attempt; others were passed to ``on_episode``.
    """
    play = _Play(entry, config, endpoint, dict(known or {}), on_episode)
    asyncio.run(play.all(panel, games))
    if missing := [task for task in panel.task_ids if task not in play.episodes]:
        kind = EnvironmentFaultError if play.failed_by == {"environment"} else InfrastructureError
        raise kind(
            f"{len(missing)} of the evaluation set's {len(panel)} episodes could not be played; the first error was: "
            f"{play.first_error}"
        )
    if play.num_long_prompts:
        warn(
            f"{play.num_long_prompts} prompts had more than max_prompt_tokens={config.max_prompt_tokens} tokens by the endpoint's "
            "count, and were sent whole; a checkpoint would have been shown a part of them."
        )
    ordered = [play.episodes[task] for task in panel.task_ids]
    return EvaluationResult(endpoint_protocol(config, panel, entry, endpoint), ordered, policy=endpoint.model)


class _Play:
    """The games of one evaluation: environments in one thread, each request in another."""

    def __init__(
        self,
        entry: EnvironmentEntry,
        config: RunSettings,
        endpoint: ChatEndpoint,
        episodes: dict[str, EpisodeResult],
        on_episode: Callable[[EpisodeResult], None],
    ) -> None:
        self._entry = entry
        self._config = config
        self._endpoint = endpoint
        self._on_episode = on_episode
        self._template = entry.adapter.template(config.prompt_style)
        self.episodes = episodes
        self.num_long_prompts = 0
        self.failed_by: set[str | None] = set()
        self.first_error: str | None = None

    async def all(self, panel: Panel, games: int) -> None:
        for _ in range(1 + self._config.max_group_redraws):
            pending = [task for task in panel.task_ids if task not in self.episodes]
            self.failed_by.clear()
            self.first_error = None
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(games, len(pending))):
                        group.create_task(self._games(panel, pending))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _games(self, panel: Panel, pending: list[str]) -> None:
        """Play tasks until none is left, one after the other in one environment."""
        env = GuardedEnv(self._entry)
        try:
            while pending:
                task = pending.pop(0)
                if env.faulty:
                    env.close()
                    env = GuardedEnv(self._entry)
                # As PanelPlayer and its env runners derive them.
                seed = derive_seed(self._config.evaluation_seed, panel.env_id, panel.split, task)
                player = EndpointPlayer(self._template, self._config, derive_seed(seed, 0), self._answer)
                trajectory = await play_episode(env, task, player, env_seed=seed)
                self.num_long_prompts += player.num_long_prompts
                episode = EpisodeResult.from_trajectory(trajectory)
                if episode.failed:
                    self.failed_by.add(trajectory.failed_by)
                    self.first_error = self.first_error or trajectory.error
                else:
                    self.episodes[task] = episode
                    self._on_episode(episode)
        finally:
            env.close()

    async def _answer(self, messages: list[Message], sampling: Mapping[str, Any]) -> ChatAnswer:
        """The endpoint's answer, from a thread that does not keep an interrupted process from ending."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ChatAnswer] = loop.create_future()

        def ask() -> None:
            try:
                answer, error = self._endpoint.answer(messages, sampling), None
            except Exception as raised:
                answer, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_settle, future, answer, error)

        threading.Thread(target=ask, name="endpoint", daemon=True).start()
        return await future


def _settle(future: asyncio.Future[ChatAnswer], answer: ChatAnswer | None, error: Exception | None) -> None:
    if future.done():
        return
    if answer is not None:
        future.set_result(answer)
    elif error is not None:
        future.set_exception(error)
