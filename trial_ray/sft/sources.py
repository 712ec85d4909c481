"""Loads the episodes to imitate from recordings or files of messages; prompts are written as in the run after fine-tuning."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import CONVERSATIONS, PromptContext, PromptStyle
from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.errors import ChatTemplateError, ConfigError, PromptTooLongError, UserInputError
from trial_ray.files import Json, Record, text_digest
from trial_ray.prompts.chat_template import describe_chat_template
from trial_ray.prompts.styles import prompt_writer, template_options
from trial_ray.prompts.tool_calls import read_call
from trial_ray.prompts.tool_conversation import ToolConversationBuilder, call_message
from trial_ray.prompts.writer import Message, PromptWriter
from trial_ray.sft.messages import Recording, shown
from trial_ray.trajectory import Trajectory, Turn
from trial_ray.warmstart.demonstrations import response_text

TAGGED = {"tagged", "conversation"}
"""Prompt styles whose responses contain the action in ``<action>`` tags; either style can use the other's responses."""
ROLES = {"user": "u", "tool": "t", "assistant": "a"}
"""Letters by which :func:`_conversation` checks the order of the roles of messages."""
Read = Callable[[], Trajectory]
"""Function that returns an episode of a source, or raises :class:`Unusable`."""


class Unusable(Exception):
    """An episode or a response cannot be imitated; :class:`Dropped` counts it under the error's message."""


@dataclass
class Dropped:
    """Numbers of episodes and turns that are not imitated, by reason.

    Attributes:
        strict: whether the first episode or turn that cannot be imitated raises an error instead of being counted.
    """

    strict: bool = False
    episodes: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, reason: str, where: str) -> None:
        """Count an episode (``kind`` is ``"episodes"``) or a turn (``"turns"``).

        Raises:
            UserInputError: ``strict`` is set; the message has ``where`` and the reason.
        """
        if self.strict:
            raise UserInputError(f"{where}: {reason}. Correct it, or leave out --strict, which counts it instead.")
        getattr(self, kind)[reason] += 1


def load_episodes(
    source: Path, config: GRPOConfig, tokenizer: Any, dropped: Dropped, adapters: Sequence[EnvironmentAdapter] = ()
) -> list[Trajectory]:
    """Return the episodes of a source, in order, with the turns to imitate and the ids of their prompts and responses.

    Args:
        source: folder of a run or of ``evaluate --record``, or a file of messages (``.jsonl`` or ``.parquet``).
        config: config of the run that will start from the fine-tuned policy.
        tokenizer: the policy's tokenizer.
        dropped: counts the dropped episodes and turns.
        adapters: the user's environment adapters with which recorded episodes were played.

    Raises:
        UserInputError: the source does not exist, is neither such a folder nor such a file, or has no recorded episodes; or
            an episode or turn cannot be imitated and ``dropped.strict`` is set.
        CheckpointError: the config of a recording cannot be read.
    """
    if source.is_dir():
        readers = _recorded(Recording(source, adapters), config, tokenizer)
    elif source.suffix in (".jsonl", ".parquet"):
        readers = _from_messages(source, config, tokenizer)
    else:
        raise UserInputError(
            f"{source} is neither a folder with recorded episodes nor a file of messages (.jsonl or .parquet)."
        )
    episodes = []
    for where, read in readers:
        try:
            episode = read()
        except Unusable as error:
            dropped.note("episodes", str(error), where)
            continue
        turns = []
        for turn in episode.turns:
            if reason := _defect(turn, config):
                dropped.note("turns", reason, where)
            else:
                # The loss divides logits by the temperature, so replace the sampling temperature by 1.
                turns.append(replace(turn, temperature=1.0))
        episodes.append(replace(episode, turns=turns))
    return episodes


def _defect(turn: Turn, config: GRPOConfig) -> str:
    """Return the reason why a turn is not imitated; an empty string if it is imitated."""
    if not turn.valid:
        return "responses without the required format"
    if turn.invalid_action:
        return "actions that the environment did not understand"
    if turn.finish_reason == "length" or len(turn.response_ids) > config.max_response_tokens:
        return f"responses longer than max_response_tokens={config.max_response_tokens}"
    if len(turn.prompt_ids) > config.max_prompt_tokens:
        return f"prompts longer than max_prompt_tokens={config.max_prompt_tokens}"
    return ""


def _written(
    writer: PromptWriter, decisions: Iterable[tuple[StepResult, Turn, str | Message, Sequence[str]]]
) -> list[Turn]:
    """Return the turns of an episode with the token ids of their responses, and of their prompts as the run writes them.

    Args:
        writer: writes the prompts.
        decisions: one tuple for each turn: the result of the ``reset`` or ``step`` before the turn; the turn; its response, as
            a text or as a message with tool calls; and the answers to the tool calls of the previous turn, which are empty if
            the previous turn already contains its answers.

    Raises:
        Unusable: a response cannot be written, a prompt is too long, or the answers do not match the calls.
    """
    turns: list[Turn] = []
    for result, turn, response, answers in decisions:
        if turns and answers and len(answers) != turns[-1].num_steps:
            raise Unusable("rows in which calls and answers of tools differ in number")
        if len(answers) > 1:
            turns[-1] = replace(turns[-1], answers=tuple(answers))
        try:
            prompt = writer.write(result, turns)
            if isinstance(writer, ToolConversationBuilder) and not isinstance(response, str):
                ids = writer.encode_message(response)
            else:
                ids = writer.encode(prompt, str(response))
        except PromptTooLongError as error:
            raise Unusable(f"prompts longer than max_prompt_tokens={writer.max_prompt_tokens}") from error
        except (ValueError, ChatTemplateError) as error:
            raise Unusable(f"the chat template cannot write a response: {error!s:.100}") from error
        projection = writer.read(prompt, ids)
        if turn.action and turn.valid and projection.action != turn.action:
            raise Unusable(f"a response is read as another action in the style {writer.template.style!r}")
        written = replace(
            turn,
            prompt_ids=prompt.ids,
            insert_at=prompt.insert_at,
            prompt_cut=prompt.cut,
            response_ids=ids,
            valid=turn.valid and projection.valid,
        )
        if not turn.action:
            written = replace(written, action=projection.action, actions=projection.actions, answers=projection.answers)
        turns.append(written)
    return turns


# -- recordings --------------------------------------------------------------------------------------------------------


def _recorded(recording: Recording, config: GRPOConfig, tokenizer: Any) -> Iterator[tuple[str, Read]]:
    adapters = {entry.env_id: entry.adapter for entry in config.environment_entries()}

    @cache
    def writer(name: str) -> PromptWriter:
        recorded = recording.config.adapter_of(name)
        return prompt_writer(tokenizer, config, adapters.get(recorded.env_id, recorded))

    same = _same_tokens(recording, config, tokenizer)
    for episode in recording.episodes():
        read = partial(replace, episode)
        if not same or not _has_same_prompt(episode, writer(episode.environment)):
            read = partial(_rewritten, recording, episode, writer(episode.environment))
        yield f"the episode of task {episode.task_id}", read


def _has_same_prompt(episode: Trajectory, writer: PromptWriter) -> bool:
    """Return whether all turns have recorded ids, and ``writer`` writes the recorded prompt for the first turn."""
    first = episode.turns[0]
    if not all(len(turn.response_ids) for turn in episode.turns):
        return False
    try:
        return np.array_equal(writer.write(shown(episode, first), ()).ids, first.prompt_ids)
    except (PromptTooLongError, ChatTemplateError):
        return False


def _same_tokens(recording: Recording, config: GRPOConfig, tokenizer: Any) -> bool:
    """Return whether run and recording have the same vocabulary, chat template, prompt style, tool format and history window."""

    def described(tokenizer: Any, config: GRPOConfig) -> tuple[Any, ...]:
        template = describe_chat_template(tokenizer, template_options(config))
        return tokenizer.get_vocab(), template, config.prompt_style, config.tool_format, config.history_window

    known = recording.tokenizer
    return known is not None and described(known, recording.config) == described(tokenizer, config)


def _rewritten(recording: Recording, episode: Trajectory, writer: PromptWriter) -> Trajectory:
    """Return the episode with the prompts that the run's writer writes for the recorded observations."""
    keeps_calls = (
        isinstance(writer, ToolConversationBuilder)
        and (tools := recording.tools(episode)) is not None
        and tools.schemas == writer.tools.schemas
    )
    decisions = (
        (shown(episode, turn), turn, _response(recording, turn, writer, keeps_calls), ()) for turn in episode.turns
    )
    return replace(episode, turns=_written(writer, decisions))


def _response(recording: Recording, turn: Turn, writer: PromptWriter, keeps_calls: bool) -> str | Message:
    """Return a recorded response in the run's prompt style, as a text or as a message with tool calls.

    Args:
        recording: the recording.
        turn: a recorded turn.
        writer: the run's prompt writer.
        keeps_calls: whether the run has the recording's tools; if not, the run's tools are called with the recorded actions.
    """
    style, source = writer.template.style, recording.config.prompt_style
    if turn.actions and style != "tools":
        raise Unusable(f"a response with several actions, which the style {style!r} lacks")
    if isinstance(writer, ToolConversationBuilder):
        # If a call has no action, for example because it is malformed, keep the recorded message; the turn is not imitated.
        if keeps_calls or (source == "tools" and "" in turn.all_actions):
            return recording.message(turn, writer.tools)
        calls = [call for action in turn.all_actions if (call := writer.tools.call_of(action)) is not None]
        if len(calls) < len(turn.all_actions):
            raise Unusable("no tool has the recorded action")
        return call_message(*calls)
    keeps_text = style == source or {style, source} == TAGGED
    return recording.response(turn) if keeps_text else response_text(turn.action, style)


# -- files of messages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AsWritten:
    """Prompt template that writes the messages of a file unchanged."""

    style: PromptStyle
    project: Callable[[str], Any]

    def render(self, context: PromptContext) -> str:
        return context.observation

    def system(self, task: str) -> str:
        return task


def _from_messages(file: Path, config: GRPOConfig, tokenizer: Any) -> Iterator[tuple[str, Read]]:
    (entry, *_) = config.environment_entries()
    style = config.prompt_style
    template = _AsWritten(style, entry.adapter.template(style).project)
    writer = prompt_writer(tokenizer, config, replace(entry.adapter, templates={style: template}))
    writer.history_window = 0  # The messages of a file already contain their history.
    for number, row in enumerate(_read_rows(file), start=1):
        yield f"{file}, row {number}", partial(_conversation, row, writer)


def _read_rows(file: Path) -> Iterator[Any]:
    """Yield the rows of a file; ``None`` for a line that is not JSON."""
    if not file.is_file():
        raise UserInputError(f"{file} does not exist.")
    if file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from pq.read_table(file).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserInputError(f"{file} is not a Parquet file ({error!s:.200}).") from error
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _conversation(row: Any, writer: PromptWriter) -> Trajectory:
    """Return a row of messages as an episode.

    Raises:
        Unusable: the row is not a conversation, or the run's prompt style cannot represent it.
    """
    style = writer.template.style
    row = {name: _decoded(row[name]) for name in row} if isinstance(row, dict) else {}
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unusable("rows without a list of messages")
    system = _text(messages.pop(0)) if messages and messages[0].get("role") == "system" else ""
    roles = "".join(ROLES.get(str(message.get("role")), "?") for message in messages)
    # Consecutive tool messages are the results of several calls in one response, so the next response answers all of them.
    if not re.fullmatch("((u|t+)a)+" if style == "tools" else "(ua)+", roles):
        raise Unusable("rows whose messages of user (or tool) and assistant do not alternate")
    spans = [match.span() for match in re.finditer("[ut]+a", roles)]
    if style not in CONVERSATIONS and (system or len(spans) > 1):
        raise Unusable(f"rows with a system message or several responses, for which the style {style!r} has no place")
    decisions = (
        (
            StepResult(texts[-1], system, "", ()),
            Turn(observation=texts[-1]),
            _answer(messages[end - 1], writer),
            texts,
        )
        for start, end in spans
        for texts in [tuple(map(_text, messages[start : end - 1]))]
    )
    turns = _written(writer, decisions)
    task, reward = row.get("task_id"), row.get("return", 1.0)
    if not isinstance(task, str):
        task = text_digest(json.dumps([system, turns[0].observation])).hex()[:16]
    if not isinstance(reward, int | float):
        raise Unusable("rows whose return is not a number")
    return Trajectory(task, "", 0, turns, bool(row.get("success", True)), function_reward=float(reward))


def _decoded(value: Any) -> Any:
    """Decode a string, or strings in a list, that contain a JSON object or array; return other values unchanged."""
    if isinstance(value, list):
        return [_decoded(element) for element in value]
    try:
        return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    except ValueError:
        return value


def _text(message: Record) -> str:
    """Return a message's content as text; the texts of a list of parts are joined."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Unusable("messages whose content is not text")
    return "".join(texts)


def _answer(message: Record, writer: PromptWriter) -> str | Message:
    """Return an assistant message as a text or, if the prompts have tools, as a message with decoded call arguments."""
    content, reasoning = _text(message), message.get("reasoning_content") or message.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, str) else ""
    if not isinstance(writer, ToolConversationBuilder):
        if message.get("tool_calls"):
            raise Unusable("rows with tool calls; set prompt_style='tools' to imitate them")
        return f"<think>\n{reasoning.strip()}\n</think>\n\n{content}" if reasoning else content
    calls = []
    for call in message.get("tool_calls") or []:
        name, arguments = read_call(call)
        if name not in writer.tools.names:
            raise Unusable("calls of a tool that the environment does not have")
        if not isinstance(arguments := _decoded(arguments), dict):
            raise Unusable("calls whose arguments are not a JSON object")
        # A Parquet file has null for arguments that a call lacks.
        given = {key: value for key, value in arguments.items() if value is not None}
        calls.append({"type": "function", "function": {"name": name, "arguments": given}})
    answer: Json = {"role": "assistant", "content": content}
    if reasoning:
        answer["reasoning_content"] = reasoning
    return answer | ({"tool_calls": calls} if calls else {})


# -- selection ---------------------------------------------------------------------------------------------------------


def episode_value(trajectory: Trajectory) -> float:
    """Return the return by which :func:`select` ranks an episode: ``function_reward`` if it is set, else the sum of rewards."""
    given = trajectory.function_reward
    return trajectory.episode_return if given is None else given


def select(
    episodes: Sequence[Trajectory], dropped: Dropped, min_return: float | None = None, per_task: int | None = None
) -> list[Trajectory]:
    """Return the episodes to imitate, in their order, and count the others.

    Args:
        episodes: all usable episodes.
        dropped: counts the other episodes.
        min_return: minimum return of an episode, or ``None`` for no minimum.
        per_task: maximum number of episodes of a task, of which those with the highest returns are kept; ``None`` for no limit.

    Raises:
        ConfigError: no episode is left.
    """
    kept, seen, of_task = list[int](), set[Any](), Counter[str]()
    for number in sorted(range(len(episodes)), key=lambda number: -episode_value(episodes[number])):
        episode = episodes[number]
        key = tuple((turn.prompt_ids.tobytes(), turn.response_ids.tobytes()) for turn in episode.turns)
        if not episode.turns:
            reason = "episodes without a turn to imitate"
        elif min_return is not None and episode_value(episode) < min_return:
            reason = f"a return below {min_return:g}"
        elif key in seen:
            reason = "exact repetitions of another episode"
        elif per_task and of_task[episode.task_id] == per_task:
            reason = f"more than {per_task} episodes of their task"
        else:
            seen.add(key)
            of_task[episode.task_id] += 1
            kept.append(number)
            continue
        dropped.episodes[reason] += 1
    if not kept:
        raise ConfigError(f"No episode is left to imitate; left out are {dict(dropped.episodes)}.")
    return [episodes[number] for number in sorted(kept)]
