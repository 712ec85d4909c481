"""Plays an evaluation set with a model that is served by an OpenAI-compatible chat API."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import urllib.parse
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trial_envs.core.extras import install_command
from trial_envs.core.projection import with_opening
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.registry import EnvironmentEntry
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
from trial_ray.evaluation.player import Known, prompt_protocol
from trial_ray.evaluation.results import UNCONTROLLED
from trial_ray.files import Json, Record
from trial_ray.models.loading import load_tokenizer
from trial_ray.models.prefix_tree import common_prefix
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.styles import template_options
from trial_ray.prompts.writer import Message, MessageWriter, PromptWriter
from trial_ray.rollout.episode import History, derive_seed, play_episode
from trial_ray.secrets import HIDDEN, redacted
from trial_ray.trajectory import EpisodeResult, Trajectory, Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RETRIES, MAX_PAUSE_S = 5, 120.0
"""Number of retries of a request after status 408, 409, 429 or 5xx, a lost connection or a timeout, and the longest pause before
a retry, in seconds, that the server can request with ``Retry-After``."""
BUSY = frozenset({408, 409, 429})
"""Status codes below 500 after which the same request may succeed later."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model served at ``POST {url}/chat/completions``; the API key is never stored in attributes, messages or files.

    Attributes:
        url: base URL, such as ``http://127.0.0.1:8000/v1``.
        model: name of the model at the endpoint.
        key_variable: name of the environment variable with the API key; ``None``: no key is needed.
        timeout_s: timeout of one request, in seconds.
        body: fields that are added to each request or replace its fields; a field with the value ``None`` is removed.
        neutral: fields of each request that replace the server's own defaults; fields of ``body`` take precedence.
        uncontrolled: names of the server's settings that requests do not set and that cannot be compared with training's.

    Raises:
        UserInputError: ``url`` is not an HTTP(S) URL, or contains a user, password or query; or the API key is missing.
    """

    url: str
    model: str
    key_variable: str | None = None
    timeout_s: float = 120.0
    body: Record = field(default_factory=dict)
    neutral: Record = field(default_factory=dict)
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

    async def complete(self, client: AsyncOpenAI, messages: Any, fields: Record) -> tuple[str, str]:
        """Request a completion; return its text and its finish reason.

        Args:
            client: client of the endpoint.
            messages: conversation in the format of the API.
            fields: further fields of the request.

        Raises:
            EngineError: the endpoint is busy or fails, or its answer is not a chat completion.
            PromptTooLongError: the conversation is longer than the model's context.
            UserInputError: the endpoint rejects the request because the key, the model or a field is wrong.
        """
        import openai

        body = {name: value for name, value in {**fields, **self.neutral, **self.body}.items() if value is not None}
        try:
            # Limit the total time: the client's own timeout restarts with each byte that arrives.
            async with asyncio.timeout((1 + RETRIES) * (self.timeout_s + MAX_PAUSE_S)):
                completion = await client.chat.completions.create(model=self.model, messages=messages, extra_body=body)
            choice = completion.choices[0]
            reply = choice.message
            text: Any = reply.content or ""
            if not isinstance(text, str):
                raise TypeError(f"the message's content is of type {type(text).__name__}")
            # Some servers return the reasoning in a separate field.
            reasoning = getattr(reply, "reasoning_content", None) or getattr(reply, "reasoning", None)
            if isinstance(reasoning, str) and reasoning:
                text = f"<think>\n{reasoning.strip()}\n</think>\n\n{text}"
            return text, choice.finish_reason
        except openai.APIStatusError as error:
            message = f"{self.url} answered with status {error.status_code}: {self.clean(error)}."
            if error.status_code >= 500 or error.status_code in BUSY:
                raise EngineError(message) from None
            if re.search("context.length", message, re.IGNORECASE):
                raise PromptTooLongError(message) from None
            raise UserInputError(f"{message} Check --endpoint, --model, --api-key-env and --body.") from None
        except Exception as error:  # The client returns incomplete objects for answers that are not chat completions.
            raise EngineError(f"{self.url} gave no chat completion: {self.clean(error)}.") from None

    def clean(self, error: Exception) -> str:
        """Return the first line of an error's message, without the API key and other secrets."""
        text = first_line(error)
        return redacted(text.replace(key, HIDDEN) if (key := self._key()) else text)


@dataclass(frozen=True)
class EndpointPlayer:
    """Plays one episode through chat messages, which have the same texts as the prompts in training.

    Unlike in training, prompts are never truncated: their tokens cannot be counted, so ``max_prompt_tokens`` has no effect.

    Attributes:
        endpoint: endpoint that generates the responses.
        client: client of the endpoint.
        writer: writes the messages; its prompt template also reads the actions from the responses.
        config: sampling settings.
        seed: seed of the episode.
    """

    endpoint: ChatEndpoint
    client: AsyncOpenAI
    writer: MessageWriter
    config: RunSettings
    seed: int

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        """Send the next turn's messages, and read the action in the answer; see :class:`~trial_ray.rollout.episode.Player`.

        Raises:
            UserInputError: as in :meth:`ChatEndpoint.complete`.
        """
        config = self.config
        fields = {
            "temperature": config.evaluation_temperature,
            "top_p": config.evaluation_top_p if config.evaluation_temperature else None,
            "max_tokens": config.max_response_tokens,
            "seed": derive_seed(self.seed, step),
            # vLLM and SGLang read chat_template_kwargs; other endpoints may reject a request with it.
            "chat_template_kwargs": dict(config.chat_template_kwargs) or None,
        }
        if result.call is None:
            new, sent = self.writer.write(result, history), [*self.writer.conversation]
        else:
            new, sent = result.call.messages[result.call.num_known :], result.call.messages
        text, finish_reason = await self.endpoint.complete(self.client, sent, fields)
        if config.prompt_style != "plain":
            text = with_opening(text)
        # Stop strings are not sent: an endpoint would remove them from the response.
        if ends := [text.index(stop) + len(stop) for stop in config.stop_strings if stop in text]:
            text, finish_reason = text[: min(ends)], "stop"
        self.writer.answer({"role": "assistant", "content": text})
        projection = self.writer.template.project(text)
        return Turn(
            action=projection.action,
            valid=projection.valid,
            outcome=projection.answer,
            finish_reason="length" if finish_reason == "length" else "stop",
            messages=json.dumps(new, ensure_ascii=False),
            response=text,
        )


def endpoint_protocol(
    config: RunSettings, evaluation_set: EvaluationSet, entry: EnvironmentEntry, endpoint: ChatEndpoint
) -> Json:
    """Return the evaluation protocol of a chat endpoint, which can be compared with the evaluation protocol of a checkpoint.

    It also has the request fields ``endpoint.body``, if any, and ``endpoint.uncontrolled``; comparisons ignore only the latter.
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
    known: Known,
    on_episode: Callable[[EpisodeResult], None],
    *,
    record: Callable[[Trajectory], None],
) -> None:
    """Play every task of an evaluation set that is not in ``known``, several tasks at the same time.

    Args:
        evaluation_set: the tasks.
        entry: the environment.
        config: prompt style, sampling and limits.
        endpoint: endpoint that generates the responses.
        games: number of tasks to play at the same time, at least 1.
        known: finished episodes by task, which are not played again.
        on_episode: called with each episode of a task once the task's last episode is completed; the order of tasks is arbitrary.
        record: called with the trajectory of each episode before ``on_episode``.

    Raises:
        UserInputError: the endpoint rejects requests.
        InfrastructureError: some episodes failed; the episodes of all other tasks were passed to ``on_episode``.
        ConfigError: the prompt style is ``tools``.
    """
    if config.prompt_style == "tools":
        raise ConfigError(
            "prompt_style is 'tools', whose calls are read from token ids, which an endpoint does not return; expected 'tagged', "
            "'plain' or 'conversation' with --endpoint. Set --set prompt_style=conversation."
        )
    template = entry.adapter.template(config.prompt_style)
    pending = [task for task in evaluation_set.task_ids if task not in known]
    errors: list[str] = []

    async def play(client: AsyncOpenAI, env: GuardedEnv, task: str) -> None:
        # Derive the same seeds as play_evaluation_set() and the env runners do.
        seed = derive_seed(config.evaluation_seed, evaluation_set.env_id, evaluation_set.split, task)
        played = []
        for rollout in range(evaluation_set.rollouts):
            writer = MessageWriter(template, config.history_window)
            player = EndpointPlayer(endpoint, client, writer, config, derive_seed(seed, rollout))
            played.append(await play_episode(env, task, player, env_seed=seed))
            if played[-1].failed:
                errors.append(f"{task}: {played[-1].error}")
                return
        for trajectory in played:  # Without an await here, the task's episodes are recorded consecutively.
            record(trajectory)
            on_episode(EpisodeResult.from_trajectory(trajectory))

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
            f"{len(errors)} of the evaluation set's {len(evaluation_set)} tasks could not be played; the first error was: "
            f"{errors[0]} "
            "With --json FILE the same command plays only these again."
        )


NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Request fields that make vLLM and SGLang sample as in training; the servers take missing fields from the model's config."""
SERVERS = ("vllm", "sglang")
"""Values of ``owned_by`` in a server's list of models that mean that the server accepts the fields of :data:`NEUTRAL`."""
LENGTH_LIMIT = "max_new_tokens"
"""Setting in the served model's generation config that limits responses in addition to a request's ``max_tokens``."""
PROMPT_IDS = "prompt_ids"
_ANY_LENGTH = 1_000_000
_SHOWN = ("You are in a room. There is a desk.", "On the desk, there is a pencil.")
_REASONED = "<think>\nThe desk is near.\n</think>\n\n<action>look</action>"


def connect(endpoint: ChatEndpoint, config: RunSettings, entry: EnvironmentEntry) -> ChatEndpoint:
    """Query the server's type, compare its prompts with training's, and return a copy of the endpoint with the results.

    The results are the attributes ``neutral`` and ``uncontrolled``.

    Args:
        endpoint: the endpoint.
        config: settings; if ``model_path`` is set, its tokenizer is compared with the server's.
        entry: the environment.

    Raises:
        EngineError: the server is busy or fails.
        UserInputError: the server has the checkpoint's tokenizer, but makes prompts with other token ids than training.
    """

    async def connected() -> ChatEndpoint:
        async with endpoint.client() as client:
            reads_neutral = await _owner(endpoint, client) in SERVERS
            compared = config.model_path is not None and await _has_equal_prompts(endpoint, client, config, entry)
        unknown = [LENGTH_LIMIT, *([] if reads_neutral else NEUTRAL), *([] if compared else [PROMPT_IDS])]
        return dataclasses.replace(
            endpoint,
            neutral=NEUTRAL if reads_neutral else {},
            uncontrolled=tuple(sorted({*unknown} - endpoint.body.keys())),
        )

    return asyncio.run(connected())


async def _owner(endpoint: ChatEndpoint, client: AsyncOpenAI) -> Any:
    """Return ``owned_by`` of the model in the server's list of models, such as ``vllm``; ``None`` if it is missing."""
    answer = await _request(endpoint, client, "/models")
    cards = answer.get("data") if isinstance(answer, dict) else None
    owners = {card.get("id"): card.get("owned_by") for card in cards or [] if isinstance(card, dict)}
    return owners.get(endpoint.model)


async def _has_equal_prompts(
    endpoint: ChatEndpoint, client: AsyncOpenAI, config: RunSettings, entry: EnvironmentEntry
) -> bool:
    """Return True if the server makes the same prompt ids as training, False if they cannot be compared.

    Raises:
        UserInputError: the prompt ids differ.
    """
    tokenizer = load_tokenizer(str(config.model_path))
    url = f"{endpoint.url.rstrip('/').removesuffix('/v1')}/tokenize"
    plain = {"prompt": " ".join(_SHOWN), "add_special_tokens": False}
    tokens = await _tokens(endpoint, client, url, plain)
    if tokens is None or tokens != tokenizer(plain["prompt"], add_special_tokens=False)["input_ids"]:
        return False  # The server does not tokenize, or its model has another tokenizer.
    messages, expected = _probe(config, entry, tokenizer)
    kwargs = dict(config.chat_template_kwargs)
    served = await _tokens(
        endpoint, client, url, {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}
    )
    if served is None or served == expected:
        return served is not None
    start = common_prefix(np.array(served), np.array(expected))
    ours, theirs = (tokenizer.decode(ids[max(0, start - 2) : start + 8]) for ids in (expected, served))
    raise UserInputError(
        f"{endpoint.url} makes other prompts than training does, although it has the tokenizer of {config.model_path}: it writes "
        f"{theirs!r} where training writes {ours!r}. A chat template that drops the reasoning of earlier responses does so in a "
        "conversation. Evaluate the checkpoint without --endpoint, or serve the template and the chat_template_kwargs of training."
    )


def _probe(config: RunSettings, entry: EnvironmentEntry, tokenizer: Any) -> tuple[list[Message], list[int]]:
    """Return example messages of an episode, and the token ids of the prompt that training makes from them."""
    template = entry.adapter.template(config.prompt_style)
    sent = MessageWriter(template, config.history_window)
    conversation = config.prompt_style == "conversation"
    kind = cast(type[PromptWriter], ConversationBuilder if conversation else PromptBuilder)
    writer = kind(tokenizer, template, _ANY_LENGTH, config.history_window, template_options(config))
    turns: list[Turn] = []
    shown = [StepResult(text, "find the pencil.", "", ("look",)) for text in _SHOWN]
    sent.write(shown[0], turns)
    prompt = writer.write(shown[0], turns)
    if conversation:
        opened = tokenizer.decode(prompt.ids).rstrip().endswith("<think>")
        text = _REASONED.removeprefix("<think>\n") if opened else _REASONED
        response = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        sent.answer({"role": "assistant", "content": _REASONED})
        turns.append(Turn(prompt.ids, response, insert_at=prompt.insert_at, observation=_SHOWN[0], action="look"))
        sent.write(shown[1], turns)
        prompt = writer.write(shown[1], turns)
    return sent.conversation, prompt.ids.tolist()


async def _tokens(endpoint: ChatEndpoint, client: AsyncOpenAI, url: str, body: Json) -> list[int] | None:
    """Return the server's token ids for the text or messages in ``body``; ``None`` if the server does not return ids."""
    answer = await _request(endpoint, client, url, {"model": endpoint.model, **body})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) else None


async def _request(endpoint: ChatEndpoint, client: AsyncOpenAI, url: str, body: Any = None) -> Any:
    """Return the server's answer; ``None`` if the answer is not JSON, or the server rejects the request or lacks the path.

    Args:
        endpoint: the endpoint.
        client: client of the endpoint.
        url: URL, or path below the endpoint's URL.
        body: JSON value to post; ``None``: send a GET request.

    Raises:
        EngineError: the server is busy or fails.
    """
    import openai

    try:
        if body is None:
            return await client.get(url, cast_to=object)
        return await client.post(url, body=body, cast_to=object)
    except openai.APIStatusError as error:
        if error.status_code not in BUSY and error.status_code in (*range(300, 500), 501):
            return None
        raise EngineError(f"{url} answered with status {error.status_code}: {endpoint.clean(error)}.") from None
    except openai.APIConnectionError as error:
        raise EngineError(f"{endpoint.url} cannot be reached: {endpoint.clean(error)}.") from None
    except ValueError:  # The answer is not valid JSON.
        return None
