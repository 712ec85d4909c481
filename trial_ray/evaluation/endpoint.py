"""Plays an evaluation set with a model that is served by an OpenAI-compatible chat API."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from trial_envs.core.extras import install_command
from trial_envs.core.projection import with_opening
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.adapters.templates import ConversationPrompt, PromptContext, PromptTemplate
from trial_ray.config.run import RunSettings
from trial_ray.errors import (
    ConfigError,
    EngineError,
    InfrastructureError,
    MissingDependencyError,
    PromptTooLongError,
    UserInputError,
    first_line,
)
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.player import prompt_protocol
from trial_ray.evaluation.results import UNCONTROLLED, EvaluationResult
from trial_ray.prompts.writer import records
from trial_ray.rollout.episode import History, derive_seed, play_episode
from trial_ray.secrets import HIDDEN, redacted
from trial_ray.trajectory import EpisodeResult, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RETRIES, MAX_PAUSE_S = 5, 120.0
"""Number of retries if a request fails with 408, 409, 429 or 5xx, disconnects or times out, and the maximum pause between them
(set by ``Retry-After``)."""
BUSY = frozenset({408, 409, 429})
"""Status codes below 500 that do not mean that the request is invalid."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model served at ``POST {url}/chat/completions``; the API key is not stored in attributes, messages or files.

    Attributes:
        url: base URL, such as ``http://127.0.0.1:8000/v1``.
        model: name of the model at the endpoint.
        key_variable: environment variable with the API key; ``None``: no key is needed.
        timeout_s: timeout of one request, in seconds.
        body: fields that are added to each request or replace its fields; a field with the value ``None`` is removed.
        neutral: fields of each request that keep the server from applying its own defaults; ``body`` replaces them.
        uncontrolled: names of settings that are neither in the requests nor compared with those of training.

    Raises:
        UserInputError: the URL is not an HTTP(S) URL, or contains a user, password or query; or the variable is not set.
    """

    url: str
    model: str
    key_variable: str | None = None
    timeout_s: float = 120.0
    body: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    uncontrolled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise UserInputError(
                "--endpoint expects http://HOST:PORT/v1 or https://HOST/v1, without user, password or query; give a key with "
                "--api-key-env VARIABLE."
            )
        if self.key_variable and not self._key():
            raise UserInputError(
                f"--api-key-env {self.key_variable}: the environment has no such variable, or it is empty."
            )

    def _key(self) -> str:
        return os.environ.get(self.key_variable, "").strip() if self.key_variable else ""

    def client(self) -> AsyncOpenAI:
        """Return a client that retries failed requests.

        Raises:
            MissingDependencyError: the package ``openai`` is not installed.
        """
        try:
            import openai
        except ImportError as error:
            raise MissingDependencyError(
                f"--endpoint needs the package openai; install it with: {install_command('endpoint')}"
            ) from error
        return openai.AsyncOpenAI(
            api_key=self._key() or "none",  # With an empty key the client would send OPENAI_API_KEY to any endpoint.
            base_url=self.url,
            timeout=self.timeout_s,
            max_retries=RETRIES,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )

    async def complete(self, client: AsyncOpenAI, messages: Any, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Request a completion; return its text and its finish reason.

        Args:
            client: client of the endpoint.
            messages: conversation in the format of the API.
            fields: further fields of the request.

        Raises:
            EngineError: the endpoint is busy or broken, or its answer is not a chat completion.
            PromptTooLongError: the conversation is longer than the model's context.
            UserInputError: the endpoint rejects the request: key, model or a field is wrong.
        """
        import openai

        body = {name: value for name, value in {**fields, **self.neutral, **self.body}.items() if value is not None}
        try:
            # The client's own timeout restarts with each byte that arrives.
            async with asyncio.timeout((1 + RETRIES) * (self.timeout_s + MAX_PAUSE_S)):
                completion = await client.chat.completions.create(model=self.model, messages=messages, extra_body=body)
            choice = completion.choices[0]
            text: Any = choice.message.content or ""
            if not isinstance(text, str):
                raise TypeError(f"the message's content is of type {type(text).__name__}")
            return text, choice.finish_reason
        except openai.APIStatusError as error:
            message = f"{self.url} answered with status {error.status_code}: {self.clean(error)}."
            if error.status_code >= 500 or error.status_code in BUSY:
                raise EngineError(message) from None
            if re.search("context.length", message, re.IGNORECASE):
                raise PromptTooLongError(message) from None
            raise UserInputError(f"{message} Check --endpoint, --model, --api-key-env and --body.") from None
        except Exception as error:  # For other answers than chat completions the client returns incomplete objects.
            raise EngineError(f"{self.url} gave no chat completion: {self.clean(error)}.") from None

    def clean(self, error: Exception) -> str:
        """Return an error's message without the key."""
        text = first_line(error)
        return redacted(text.replace(key, HIDDEN) if (key := self._key()) else text)


@dataclass(frozen=True)
class EndpointPlayer:
    """Plays one episode through chat messages, with the same texts as in the prompts of a trained policy.

    Prompts are not limited to ``max_prompt_tokens`` as in training, because tokens are not counted: they are sent in full.

    Attributes:
        endpoint: endpoint that generates the responses.
        client: client of the endpoint.
        template: template that writes the messages and parses the responses.
        config: sampling and history settings.
        seed: seed of the episode.
        conversation: messages of the episode so far; sent with each request if the prompt style is ``conversation``.
    """

    endpoint: ChatEndpoint
    client: AsyncOpenAI
    template: PromptTemplate
    config: RunSettings
    seed: int
    conversation: list[dict[str, str]] = field(default_factory=list)

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        """Send the messages of the turn and parse the action; see :class:`~trial_ray.rollout.episode.Player`.

        Raises:
            UserInputError: as in :meth:`ChatEndpoint.complete`.
        """
        config = self.config
        fields = {
            "temperature": config.evaluation_temperature,
            "top_p": config.evaluation_top_p if config.evaluation_temperature else None,
            "max_tokens": config.max_response_tokens,
            "seed": derive_seed(self.seed, step),
            # vLLM and SGLang read this field; other endpoints may reject it.
            "chat_template_kwargs": dict(config.chat_template_kwargs) or None,
        }
        text, finish_reason = await self.endpoint.complete(self.client, self.messages(result, history, step), fields)
        if config.prompt_style != "plain":
            text = with_opening(text)
        # Stop strings are not sent: an endpoint would remove them from the response.
        if ends := [text.index(stop) + len(stop) for stop in config.stop_strings if stop in text]:
            text, finish_reason = text[: min(ends)], "stop"
        self.conversation.append({"role": "assistant", "content": text})
        projection = self.template.project(text)
        return Turn(
            action=projection.action,
            valid=projection.valid,
            outcome=projection.answer,
            finish_reason="length" if finish_reason == "length" else "stop",
        )

    def messages(self, result: StepResult, history: History, step: int) -> list[dict[str, str]]:
        """Return the messages of the next request; in a conversation they are kept for later requests."""
        window, conversation = self.config.history_window, self.config.prompt_style == "conversation"
        past = [] if conversation or not window else records(history)[-window:]
        context = PromptContext(result.task, result.observation.strip(), result.admissible_actions, tuple(past), step)
        message = {"role": "user", "content": self.template.render(context).strip()}
        if not conversation:
            return [message]
        if result.past_turns == 0:  # The conversation starts again.
            self.conversation.clear()
        if not self.conversation:
            system = cast(ConversationPrompt, self.template).system(result.task).strip()
            self.conversation.append({"role": "system", "content": system})
        self.conversation.append(message)
        return list(self.conversation)


def endpoint_protocol(
    config: RunSettings, evaluation_set: EvaluationSet, entry: EnvironmentEntry, endpoint: ChatEndpoint
) -> dict[str, Any]:
    """Return a protocol that is comparable with the protocol of a checkpoint's evaluation.

    It also has the fields from ``--body``, and the names of settings that the server determines; the latter are not compared.
    """
    return {
        **prompt_protocol(config, evaluation_set, entry),
        **({"request": dict(endpoint.body)} if endpoint.body else {}),
        UNCONTROLLED: list(endpoint.uncontrolled),
    }


def evaluate_endpoint(
    evaluation_set: EvaluationSet,
    entry: EnvironmentEntry,
    config: RunSettings,
    endpoint: ChatEndpoint,
    games: int,
    known: Mapping[str, EpisodeResult],
    on_episode: Callable[[EpisodeResult], None],
) -> EvaluationResult:
    """Play every task of an evaluation set that is not in ``known``, several at the same time.

    Args:
        evaluation_set: the tasks.
        entry: the environment.
        config: prompt style, sampling and limits.
        endpoint: endpoint that generates the responses.
        games: number of tasks to play at the same time, at least 1.
        known: finished episodes by task, which are not played again.
        on_episode: called with every episode when it ends, in any order.

    Raises:
        UserInputError: the endpoint rejects requests.
        InfrastructureError: some episodes failed; the others were passed to ``on_episode``.
        ConfigError: the prompt style is ``tools``.
    """
    if config.prompt_style == "tools":
        raise ConfigError(
            "prompt_style is 'tools', whose calls are read from token ids, which an endpoint does not return; expected 'tagged', "
            "'plain' or 'conversation' with --endpoint. Set --set prompt_style=conversation."
        )
    template = entry.adapter.template(config.prompt_style)
    episodes = dict(known)
    pending = [task for task in evaluation_set.task_ids if task not in episodes]
    errors: list[str] = []

    async def play(client: AsyncOpenAI, env: GuardedEnv, task: str) -> None:
        # EvaluationPlayer and its env runners derive the same seeds.
        seed = derive_seed(config.evaluation_seed, evaluation_set.env_id, evaluation_set.split, task)
        player = EndpointPlayer(endpoint, client, template, config, derive_seed(seed, 0))
        trajectory = await play_episode(env, task, player, env_seed=seed)
        if trajectory.failed:
            errors.append(f"{task}: {trajectory.error}")
        else:
            episodes[task] = EpisodeResult.from_trajectory(trajectory)
            on_episode(episodes[task])

    async def play_pending(client: AsyncOpenAI) -> None:
        while pending:
            with closing(GuardedEnv(entry)) as env:
                while pending and not env.faulty:
                    await play(client, env, pending.pop(0))

    async def play_all() -> None:
        async with endpoint.client() as client:
            await asyncio.gather(*(play_pending(client) for _ in range(games)))

    asyncio.run(play_all())
    if errors:
        raise InfrastructureError(
            f"{len(errors)} of the evaluation set's {len(evaluation_set)} episodes could not be played; the first error was: "
            f"{errors[0]} "
            "With --json FILE the same command plays only these again."
        )
    ordered = [episodes[task] for task in evaluation_set.task_ids]
    return EvaluationResult(endpoint_protocol(config, evaluation_set, entry, endpoint), ordered, policy=endpoint.model)
