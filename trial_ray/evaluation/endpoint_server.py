"""The server behind an endpoint: sampling fields that it applies automatically, and the token ids that it makes of messages."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.config.run import RunSettings
from trial_ray.errors import EngineError, UserInputError
from trial_ray.evaluation.endpoint import BUSY, ChatEndpoint, EndpointPlayer
from trial_ray.models.loading import load_tokenizer
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.styles import template_options
from trial_ray.prompts.writer import PromptWriter
from trial_ray.trajectory import Turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Fields with which vLLM and SGLang sample as training does. A field that is missing takes its value from the server's model."""
SERVERS = ("vllm", "sglang")
"""Owners of the models of servers that read :data:`NEUTRAL`; another server may refuse unknown fields."""
LENGTH_LIMIT = "max_new_tokens"
"""A limit of the served model's generation config, which holds beside the ``max_tokens`` of a request."""
PROMPT_IDS = "prompt_ids"
_ANY_LENGTH = 1_000_000
_SHOWN = ("You are in a room. There is a desk.", "On the desk, there is a pencil.")
_REASONED = "<think>\nThe desk is near.\n</think>\n\n<action>look</action>"


def connect(endpoint: ChatEndpoint, config: RunSettings, entry: EnvironmentEntry) -> ChatEndpoint:
    """Return the endpoint with the request fields that its server needs, and the names of the settings that stay unknown.

    Args:
        endpoint: the endpoint.
        config: prompt style, sampling and, where a checkpoint was named, the model with the tokenizer.
        entry: the environment.

    Raises:
        EngineError: the server is busy or broken.
        UserInputError: the server has the checkpoint's tokenizer and makes other prompts of the messages than training does.
    """

    async def connected() -> ChatEndpoint:
        async with endpoint.client() as client:
            known = await _owner(endpoint, client) in SERVERS
            compared = config.model_path is not None and await _has_equal_prompts(endpoint, client, config, entry)
        unknown = [LENGTH_LIMIT, *([] if known else NEUTRAL), *([] if compared else [PROMPT_IDS])]
        return dataclasses.replace(
            endpoint, neutral=NEUTRAL if known else {}, uncontrolled=tuple(sorted({*unknown} - endpoint.body.keys()))
        )

    return asyncio.run(connected())


async def _owner(endpoint: ChatEndpoint, client: AsyncOpenAI) -> Any:
    """Return the owner that the server states for the model, such as ``vllm``; ``None`` if it states none."""
    answer = await _request(endpoint, client, "/models")
    cards = answer.get("data") if isinstance(answer, dict) else None
    owners = {card.get("id"): card.get("owned_by") for card in cards or [] if isinstance(card, dict)}
    return owners.get(endpoint.model)


async def _has_equal_prompts(
    endpoint: ChatEndpoint, client: AsyncOpenAI, config: RunSettings, entry: EnvironmentEntry
) -> bool:
    """Return whether the server's prompt ids were compared and equal those of training; ``False`` if they cannot be compared.

    Raises:
        UserInputError: they differ.
    """
    tokenizer = load_tokenizer(str(config.model_path))
    url = f"{endpoint.url.rstrip('/').removesuffix('/v1')}/tokenize"
    plain = {"prompt": " ".join(_SHOWN), "add_special_tokens": False}
    tokens = await _tokens(endpoint, client, url, plain)
    if tokens is None or tokens != tokenizer(plain["prompt"], add_special_tokens=False)["input_ids"]:
        return False  # The server cannot tokenize, or serves another model.
    messages, expected = _probe(endpoint, client, config, entry, tokenizer)
    kwargs = dict(config.chat_template_kwargs)
    served = await _tokens(
        endpoint, client, url, {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}
    )
    if served is None or served == expected:
        return served is not None
    at = next(
        (n for n, pair in enumerate(zip(served, expected, strict=False)) if pair[0] != pair[1]),
        min(map(len, (served, expected))),
    )
    ours, theirs = (tokenizer.decode(ids[max(0, at - 2) : at + 8]) for ids in (expected, served))
    raise UserInputError(
        f"{endpoint.url} makes other prompts than training does, although it has the tokenizer of {config.model_path}: it writes "
        f"{theirs!r} where training writes {ours!r}. A chat template that drops the reasoning of earlier responses does so in a "
        "conversation. Evaluate the checkpoint without --endpoint, or serve the template and the chat_template_kwargs of training."
    )


def _probe(
    endpoint: ChatEndpoint, client: AsyncOpenAI, config: RunSettings, entry: EnvironmentEntry, tokenizer: Any
) -> tuple[list[dict[str, str]], list[int]]:
    """Return messages as an episode sends them, and the prompt ids that training makes of them."""
    template = entry.adapter.template(config.prompt_style)
    player = EndpointPlayer(endpoint, client, template, config, seed=0)
    conversation = config.prompt_style == "conversation"
    kind = cast(type[PromptWriter], ConversationBuilder if conversation else PromptBuilder)
    writer = kind(tokenizer, template, _ANY_LENGTH, config.history_window, template_options(config))
    turns: list[Turn] = []
    shown = [StepResult(text, "find the pencil.", "", ("look",), won=False, score=0.0) for text in _SHOWN]
    messages, prompt = player.messages(shown[0], [], 1), writer.write(shown[0], turns)
    if conversation:
        opened = tokenizer.decode(prompt.ids).rstrip().endswith("<think>")
        text = _REASONED.removeprefix("<think>\n") if opened else _REASONED
        response = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        player.conversation.append({"role": "assistant", "content": _REASONED})
        turns.append(Turn(prompt.ids, response, insert_at=prompt.insert_at, observation=_SHOWN[0], action="look"))
        messages, prompt = player.messages(shown[1], turns, 2), writer.write(shown[1], turns)
    return messages, prompt.ids.tolist()


async def _tokens(endpoint: ChatEndpoint, client: AsyncOpenAI, url: str, body: dict[str, Any]) -> list[int] | None:
    answer = await _request(endpoint, client, url, {"model": endpoint.model, **body})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) else None


async def _request(endpoint: ChatEndpoint, client: AsyncOpenAI, url: str, body: Any = None) -> Any:
    """Return the server's answer; ``None`` if it rejects the request, as a server without this path does.

    Raises:
        EngineError: the server is busy or broken.
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
