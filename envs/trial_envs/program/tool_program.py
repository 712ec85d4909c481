"""Converts environments that define tools, such as those of TRL's ``environment_factory``, to programs that call the policy."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from trial_envs.errors import MissingPackageError
from trial_envs.program.calls import MODEL, TOO_LONG, TURN_LIMIT
from trial_envs.program.env import Result

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def tool_program(
    factory: Callable[[], Any],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    reward: Callable[[Any], float] = methodcaller("get_reward"),
) -> dict[str, Any]:
    """Return keyword arguments with which :class:`ProgramEnv` plays environments that define tools, as TRL does.

    An episode makes an environment, calls ``reset(**row)`` and appends the returned text to the row's prompt. It then carries
    out the tool calls of each answer, in order, until the policy answers without a tool call or the environment refuses a chat
    request because of the limit on turns or tokens. If a tool raises an exception, the policy gets the error message as the
    tool's result. A task id is ``split/number``, where ``number`` counts the rows of the split from 0.

    Args:
        factory: makes an environment (TRL's ``environment_factory``). Its public methods, with type hints and docstrings, are
            the tools, except ``reset`` and ``get_reward``. Each method may be ``async``.
        rows: rows of a data set by split, each with a ``"prompt"``: a text, or messages of which the last is the user's.
        reward: function that is called with the environment at the end of an episode, even if it is truncated; may be
            ``async``.
    """
    example = factory()
    # Inspect the class: reading the attributes of `example` would run its properties, which may fail before `reset`.
    names = [name for name, _ in inspect.getmembers(type(example), inspect.isfunction) if name[0] != "_"]
    offered = [name for name in names if name not in ("reset", "get_reward")]
    tools = [tool_schema(getattr(example, name)) for name in offered]

    async def run(task: str, chat: AsyncOpenAI) -> Result:
        import openai

        split, _, number = task.rpartition("/")
        row = rows[split][int(number)]
        env = factory()
        prompt = row["prompt"]
        *before, user = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        question = _text(user["content"]) + _text(await _resolved(env.reset(**row)) or "")
        messages: Any = [*before, {**user, "content": question}]
        try:
            while True:
                completion = await chat.chat.completions.create(model=MODEL, messages=messages, tools=tools)  # type: ignore[arg-type]
                answer = completion.choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                if not answer.tool_calls:
                    break
                for call in answer.tool_calls:
                    content = str(await _call_tool(env, call.function, offered))  # type: ignore[union-attr]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        except openai.BadRequestError as error:
            if error.code not in (TURN_LIMIT, TOO_LONG):
                raise
        return float(await _resolved(reward(env)))

    tasks = {split: [f"{split}/{number}" for number in range(len(split_rows))] for split, split_rows in rows.items()}
    return {"run": run, "tasks": tasks}


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function with type hints and a docstring, as in the ``tools`` of a chat API.

    Raises:
        MissingPackageError: the package ``transformers``, which reads the docstring, is not installed.
    """
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise MissingPackageError("Schemas of tools need the package transformers: pip install transformers") from error
    schema: dict[str, Any] = get_json_schema(function)
    return schema


async def _call_tool(env: Any, function: Any, offered: Sequence[str]) -> Any:
    """Call a tool and return its result; an exception becomes the result, so that the policy can correct its call."""
    if function.name not in offered:  # The policy must not call `reset`, `get_reward` or private methods.
        return {"error": f"There is no tool {function.name!r}."}
    try:
        return await _resolved(getattr(env, function.name)(**json.loads(function.arguments)))
    except Exception as error:
        return {"error": str(error)}


async def _resolved(value: Any) -> Any:
    """Return the value, or its result if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def _text(content: Any) -> str:
    """Return the content of a message as text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
