"""Episodes to imitate: recorded ones and files of chat messages, with prompts as a rollout of the run would have them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import PromptContext, PromptStyle
from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.errors import ChatTemplateError, ConfigError, PromptTooLongError, UserInputError
from trial_ray.files import Json, text_digest
from trial_ray.prompts.chat_template import describe_chat_template
from trial_ray.prompts.messages import Message
from trial_ray.prompts.styles import prompt_writer, template_options
from trial_ray.prompts.tool_calls import read_call
from trial_ray.prompts.tool_conversation import ToolConversationBuilder, call_message
from trial_ray.prompts.writer import PromptWriter
from trial_ray.sft.messages import Recording, shown
from trial_ray.trajectory import Trajectory, Turn
from trial_ray.warmstart.demonstrations import response_text

ROLES = {"system", "user", "assistant", "tool"}
TAGGED = {"tagged", "conversation"}
"""Styles whose responses have the same form."""


class Unusable(Exception):
    """An episode or a response that cannot be imitated; the message is the reason, equal for all of the same kind."""


@dataclass
class Dropped:
    """Numbers of episodes and turns that are not imitated, by reason.

    Attributes:
        strict: raise an error at the first one instead of counting it.
    """

    strict: bool = False
    episodes: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, reason: str, where: str) -> None:
        """Count an episode (``kind`` is ``"episodes"``) or a turn (``"turns"``).

        Raises:
            UserInputError: with ``strict``; names the place.
        """
        if self.strict:
            raise UserInputError(f"{where}: {reason}. Correct it, or leave out --strict, which counts it instead.")
        getattr(self, kind)[reason] += 1


def load_episodes(
    source: Path, config: GRPOConfig, tokenizer: Any, dropped: Dropped, adapters: Sequence[EnvironmentAdapter] = ()
) -> list[Trajectory]:
    """Return the episodes of a source, in order; the turns to imitate have the ids of prompt and response.

    Args:
        source: folder of a run or of ``evaluate --record``, or a file of messages (``.jsonl`` or ``.parquet``).
        config: config of the run that the fine-tuned policy will start.
        tokenizer: the policy's tokenizer.
        dropped: counts what is left out.
        adapters: adapters of the user with which a recording was played.

    Raises:
        UserInputError: the source does not exist, is of another kind, or has no usable episode; or ``dropped`` is strict.
        CheckpointError: the config of a recording cannot be read.
    """
    if source.is_dir():
        episodes = _recorded(Recording(source, adapters), config, tokenizer, dropped)
    elif source.suffix in (".jsonl", ".parquet"):
        episodes = _from_messages(source, config, tokenizer, dropped)
    else:
        raise UserInputError(
            f"{source} is neither a folder with recorded episodes nor a file of messages (.jsonl or .parquet)."
        )
    return list(episodes)


# -- recordings --------------------------------------------------------------------------------------------------------


def _recorded(recording: Recording, config: GRPOConfig, tokenizer: Any, dropped: Dropped) -> Iterator[Trajectory]:
    same = _same_tokens(recording, config, tokenizer)
    writers: dict[str, PromptWriter] = {}
    for trajectory in recording.episodes():
        where = f"the episode of task {trajectory.task_id}"
        if same and all(len(turn.response_ids) for turn in trajectory.turns):
            turns = list(trajectory.turns)
        else:
            name = trajectory.environment
            if name not in writers:
                writers[name] = prompt_writer(tokenizer, config, recording.adapter(trajectory))
            try:
                turns = _rewritten(recording, trajectory, writers[name], config)
            except (Unusable, PromptTooLongError) as error:
                dropped.note("episodes", _reason(error), where)
                continue
        yield replace(trajectory, turns=_without_defects(turns, config, dropped, where))


def _same_tokens(recording: Recording, config: GRPOConfig, tokenizer: Any) -> bool:
    """Return whether the recorded ids are those that the run would have: same vocabulary, chat template, style and history."""
    names = ("prompt_style", "tool_format", "history_window")
    same = all(getattr(recording.config, name) == getattr(config, name) for name in names)
    if recording.tokenizer is None or not same:
        return False
    described = [
        describe_chat_template(each, template_options(of))
        for each, of in ((recording.tokenizer, recording.config), (tokenizer, config))
    ]
    return recording.tokenizer.get_vocab() == tokenizer.get_vocab() and described[0] == described[1]


def _rewritten(recording: Recording, trajectory: Trajectory, writer: PromptWriter, config: GRPOConfig) -> list[Turn]:
    """Return the turns with prompts that the run's writer makes of the recorded observations."""
    style, source = config.prompt_style, recording.config.prompt_style
    turns: list[Turn] = []
    for turn in trajectory.turns:
        if turn.actions and style != "tools":
            raise Unusable(f"a response with several actions, which the style {style!r} lacks")
        prompt = writer.write(shown(trajectory, turn), turns)
        if isinstance(writer, ToolConversationBuilder):
            ids = _tool_response(recording, turn, writer)
        else:
            keeps_text = style == source or {style, source} == TAGGED
            ids = writer.encode(prompt, recording.response(turn) if keeps_text else response_text(turn.action, style))
        if turn.valid and writer.read(prompt, ids).action != turn.action:
            raise Unusable(f"a response is read as another action in the style {style!r}")
        turns.append(
            replace(turn, prompt_ids=prompt.ids, insert_at=prompt.insert_at, prompt_cut=prompt.cut, response_ids=ids)
        )
    return turns


def _tool_response(recording: Recording, turn: Turn, writer: ToolConversationBuilder) -> np.ndarray:
    if recording.config.prompt_style == "tools":
        return _encoded(writer, recording.message(turn, writer.tools))
    if (call := writer.tools.call_of(turn.action)) is None:
        raise Unusable("no tool has the recorded action")
    return _encoded(writer, call_message(call))


def _encoded(writer: ToolConversationBuilder, message: Message) -> np.ndarray:
    try:
        return writer.encode_message(message)
    except (ValueError, ChatTemplateError) as error:
        raise Unusable(f"the chat template cannot write a response: {error!s:.100}") from error


def _without_defects(turns: Sequence[Turn], config: GRPOConfig, dropped: Dropped, where: str) -> list[Turn]:
    """Return the turns that are imitated, and count the others."""
    kept = []
    for turn in turns:
        if reason := _defect(turn, config):
            dropped.note("turns", reason, where)
        else:
            kept.append(turn)
    return kept


def _defect(turn: Turn, config: GRPOConfig) -> str:
    """Return why a turn is not imitated; empty if it is."""
    if not turn.valid:
        return "responses without the required form"
    if turn.invalid_action:
        return "actions that the environment did not understand"
    if turn.finish_reason == "length" or len(turn.response_ids) > config.max_response_tokens:
        return f"responses longer than max_response_tokens={config.max_response_tokens}"
    if len(turn.prompt_ids) > config.max_prompt_tokens:
        return f"prompts longer than max_prompt_tokens={config.max_prompt_tokens}"
    return ""


# -- files of messages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AsWritten:
    """Template that writes messages as they are, for a file's own texts."""

    style: PromptStyle
    read: Callable[[str], Any]

    def render(self, context: PromptContext) -> str:
        return context.observation

    def system(self, task: str) -> str:
        return task

    def project(self, response: str) -> Any:
        return self.read(response)


def _from_messages(file: Path, config: GRPOConfig, tokenizer: Any, dropped: Dropped) -> Iterator[Trajectory]:
    (entry, *_) = config.environment_entries()
    style = config.prompt_style
    own = entry.adapter.template(style)
    adapter = replace(entry.adapter, templates={style: _AsWritten(style, own.project)})
    writer = prompt_writer(tokenizer, config, adapter)
    writer.history_window = 0  # The messages have their history already.
    for number, row in enumerate(_read_rows(file), start=1):
        where = f"{file}, row {number}"
        try:
            trajectory = _conversation(row, writer, config)
        except (Unusable, PromptTooLongError) as error:
            dropped.note("episodes", _reason(error), where)
            continue
        yield replace(trajectory, turns=_without_defects(trajectory.turns, config, dropped, where))


def _read_rows(file: Path) -> Iterator[Any]:
    """Yield the rows of a file; a row that is not JSON is ``None``."""
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


def _conversation(row: Any, writer: PromptWriter, config: GRPOConfig) -> Trajectory:
    """Return a row of messages as an episode.

    Raises:
        Unusable: the row is not a conversation that the run's prompts can contain.
        PromptTooLongError: a prompt does not fit.
    """
    row = {name: _decoded(row[name]) for name in row} if isinstance(row, dict) else {}
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unusable("rows without a list of messages")
    _require_tools(messages, row.get("tools"), writer)
    system, rest = "", list(messages)
    if rest and rest[0].get("role") == "system":
        system = _text(rest.pop(0))
    is_conversation = config.prompt_style in ("conversation", "tools")
    if system and not is_conversation:
        raise Unusable(f"rows with a system message, which prompts of the style {config.prompt_style!r} lack")
    blocks: list[list[Message]] = []
    for message in rest:
        if message.get("role") == "tool" and blocks and blocks[-1][0].get("role") == "tool":
            blocks[-1].append(message)
        else:
            blocks.append([message])
    pairs = [(blocks[number], blocks[number + 1][0]) for number in range(0, len(blocks) - 1, 2)]
    asked = {"user"} if config.prompt_style != "tools" else {"user", "tool"}
    if (
        not pairs
        or len(blocks) % 2
        or any(a[0].get("role") not in asked or b.get("role") != "assistant" for a, b in pairs)
    ):
        raise Unusable("rows whose messages of user (or tool) and assistant do not alternate")
    if len(pairs) > 1 and not is_conversation:
        raise Unusable(
            f"rows with several responses, for which prompts of the style {config.prompt_style!r} have no place"
        )
    turns: list[Turn] = []
    for questions, answer in pairs:
        texts = tuple(map(_text, questions))
        if len(texts) != (turns[-1].num_steps if turns else 1):
            raise Unusable("rows in which calls and answers of tools differ in number")
        if len(texts) > 1:
            turns[-1] = replace(turns[-1], answers=texts)
        result = StepResult(texts[-1], system, "", (), won=False, score=0.0)
        prompt = writer.write(result, turns)
        if isinstance(writer, ToolConversationBuilder):
            ids = _encoded(writer, _answer(answer))
        else:
            ids = writer.encode(prompt, _with_reasoning(answer))
        read = writer.read(prompt, ids)
        turn = Turn(prompt.ids, ids, insert_at=prompt.insert_at, observation=result.observation, action=read.action)
        turn = replace(turn, valid=read.valid, prompt_cut=prompt.cut)
        turns.append(replace(turn, actions=read.actions, answers=read.answers))
    task = row.get("task_id")
    name = task if isinstance(task, str) else text_digest(json.dumps([system, _text(rest[0])])).hex()[:16]
    gained, success = row.get("return", 1.0), row.get("success", True)
    if not isinstance(gained, int | float):
        raise Unusable("rows whose return is not a number")
    return Trajectory(name, "", 0, turns, bool(success), function_reward=float(gained))


def _decoded(value: Any) -> Any:
    """Return a column or its elements that ``datasets`` has written to Parquet as JSON text; any other value as it is."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    try:
        return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    except ValueError:
        return value


def _require_tools(messages: Sequence[Mapping[str, Any]], declared: Any, writer: PromptWriter) -> None:
    known = writer.tools.names if isinstance(writer, ToolConversationBuilder) else []
    names = {entry.get("function", entry).get("name") for entry in declared or [] if isinstance(entry, dict)}
    for message in messages:
        if message.get("role") not in ROLES:
            raise Unusable("messages with an unknown role")
        calls = message.get("tool_calls") or []
        if calls and not known:
            raise Unusable("rows with tool calls; set prompt_style='tools' to imitate them")
        called = {read_call(call)[0] for call in calls}
        if not called <= set(known) or (declared and not called <= names):
            raise Unusable("calls of a tool that is not declared")


def _text(message: Mapping[str, Any]) -> str:
    """Return a message's content as text; of a list of parts, all texts."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise Unusable("messages whose content is not text")
    return content


def _reasoning(message: Mapping[str, Any]) -> str:
    found = message.get("reasoning_content") or message.get("reasoning") or ""
    return found if isinstance(found, str) else ""


def _with_reasoning(message: Mapping[str, Any]) -> str:
    reasoning, text = _reasoning(message), _text(message)
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{text}" if reasoning else text


def _answer(message: Mapping[str, Any]) -> Message:
    """Return a response for the chat template, whose calls have their arguments as objects."""
    calls = []
    for call in message.get("tool_calls") or []:
        name, arguments = read_call(call)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise Unusable("calls whose arguments are not JSON") from error
        if not isinstance(arguments, dict):
            raise Unusable("calls whose arguments are not an object")
        given = {
            key: value for key, value in arguments.items() if value is not None
        }  # Columns of a file may fill in null.
        calls.append({"type": "function", "function": {"name": name, "arguments": given}})
    answer: Json = {"role": "assistant", "content": _text(message)}
    if reasoning := _reasoning(message):
        answer["reasoning_content"] = reasoning
    return answer | ({"tool_calls": calls} if calls else {})


def _reason(error: Exception) -> str:
    """Return the reason for which an episode is left out, without its own numbers and names."""
    return "prompts longer than max_prompt_tokens" if isinstance(error, PromptTooLongError) else str(error)


# -- selection ---------------------------------------------------------------------------------------------------------


def gained(trajectory: Trajectory) -> float:
    """Return the return of an episode; a file of messages states it."""
    given = trajectory.function_reward
    return trajectory.episode_return if given is None else given


def select(
    episodes: Sequence[Trajectory], dropped: Dropped, min_return: float | None = None, per_task: int | None = None
) -> list[Trajectory]:
    """Return the episodes to imitate, in their order, and count the others.

    Args:
        episodes: all usable episodes.
        dropped: counts the others.
        min_return: least return of an episode; ``None``: any.
        per_task: maximum number of episodes of a task, those with the highest returns; ``None``: all.

    Raises:
        ConfigError: none is left.
    """
    left = Counter[str]()
    places: dict[str, list[int]] = {}
    seen: set[bytes] = set()
    for number, episode in enumerate(episodes):
        key = b"\0".join(part.tobytes() for turn in episode.turns for part in (turn.prompt_ids, turn.response_ids))
        if not episode.turns:
            left["episodes without a turn to imitate"] += 1
        elif min_return is not None and gained(episode) < min_return:
            left[f"a return below {min_return:g}"] += 1
        elif key in seen:
            left["exact repetitions of an earlier episode"] += 1
        else:
            seen.add(key)
            places.setdefault(episode.task_id, []).append(number)
    kept = []
    for numbers in places.values():
        ranked = sorted(numbers, key=lambda number: -gained(episodes[number]))
        kept += ranked[:per_task]
        if over := len(ranked[per_task:]) if per_task else 0:
            left[f"more than {per_task} episodes of their task"] += over
    dropped.episodes.update(left)
    if not kept:
        raise ConfigError(f"No episode is left to imitate, of {len(episodes)}: {dict(dropped.episodes)}.")
    return [episodes[number] for number in sorted(kept)]
