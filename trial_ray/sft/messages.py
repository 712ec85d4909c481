"""Recorded episodes as chat messages, one JSON object per conversation, which Hugging Face ``datasets`` and TRL read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.guarded import StepResult
from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.errors import UserInputError
from trial_ray.files import writing
from trial_ray.models.loading import load_tokenizer
from trial_ray.prompts.tool_calls import ToolSet, parse_response, prepare_parsing
from trial_ray.prompts.tool_conversation import call_message
from trial_ray.prompts.writer import Message, MessageWriter, ResponseTexts
from trial_ray.rollout.recording import read_iteration
from trial_ray.runs.checkpoints import find_tokenizer
from trial_ray.runs.config_record import load_record
from trial_ray.runs.folder import RunFolder
from trial_ray.trajectory import Trajectory, Turn
from trial_ray.warmstart.demonstrations import response_text


class Recording:
    """Recorded episodes of a run or of ``evaluate --record``, with the config that played them.

    Args:
        path: folder of the run or of the recording.
        adapters: the user's environment adapters with which the episodes were played.

    Attributes:
        config: config of the recorded run or evaluation.
        tokenizer: tokenizer of the recorded ids; ``None`` if the recording has no ids.

    Raises:
        CheckpointError: ``path`` is neither a run nor a recording, or its config cannot be read.
        UserInputError: nothing was recorded.
    """

    def __init__(self, path: Path, adapters: Sequence[EnvironmentAdapter]) -> None:
        folder = RunFolder.reopen(path)
        self.config: GRPOConfig = load_record(folder.path / "resolved_config.json", adapters)
        self._trajectories = folder.trajectories
        if not folder.recorded_iterations():
            raise UserInputError(f"{path} has recorded no trajectories.")
        source = self.config.model_path if folder.is_recording else find_tokenizer(folder.path)
        self.tokenizer: Any = None if source is None else load_tokenizer(str(source))
        self._responses = None if self.tokenizer is None else ResponseTexts(self.tokenizer)

    def episodes(self) -> Iterator[Trajectory]:
        """Yield every completed episode (it did not fail and has at least one turn), as recorded."""
        for group in read_iteration(self._trajectories, None):
            yield from group.completed

    def tools(self, trajectory: Trajectory) -> ToolSet | None:
        """Return the tools of an episode's environment; ``None`` if the prompt style is not ``tools``."""
        is_tools = self.config.prompt_style == "tools"
        return ToolSet(self.config.adapter_of(trajectory.environment).tools) if is_tools else None

    def response(self, turn: Turn) -> str:
        """Return the text of a turn's response; if only an action is recorded, write it in the recording's prompt style."""
        if turn.response:
            return turn.response
        if self._responses is not None and len(turn.response_ids):
            return self._responses.text(turn.prompt_ids, turn.insert_at, turn.response_ids)
        return response_text(turn.action, self.config.prompt_style)

    def message(self, turn: Turn, tools: ToolSet | None) -> Message:
        """Return a turn's response as a message; with ``tools``, its calls are in ``tool_calls``."""
        if tools is None:
            return {"role": "assistant", "content": self.response(turn)}
        if self._responses is None or not len(turn.response_ids):
            called = [*filter(None, map(tools.call_of, turn.all_actions))]
            return call_message(*called) if called else {"role": "assistant", "content": ""}
        prepare_parsing(self.tokenizer, self.config.tool_format)
        prefix = self._responses.decode(turn.prompt_ids[turn.insert_at :].tolist())
        parsed = parse_response(self.tokenizer, self._responses.whole(turn.response_ids), prefix, tools.schemas)
        calls = [
            {"type": "function", "function": call.get("function", call)} for call in parsed.get("tool_calls") or []
        ]
        message: Message = {"role": "assistant", "content": (parsed.get("content") or "").strip()}
        if reasoning := parsed.get("reasoning_content") or parsed.get("thinking"):
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})


def shown(trajectory: Trajectory, turn: Turn) -> StepResult:
    """Rebuild the result of the ``reset`` or ``step`` before a recorded turn; the turn's prompt is written from this result."""
    return StepResult(
        turn.observation,
        trajectory.instruction,
        trajectory.family,
        turn.admissible_actions,
        call=turn.call,
    )


def conversations(recording: Recording, trajectory: Trajectory) -> Iterator[list[Message]]:
    """Yield the conversations of an episode, each as a list of messages.

    The prompt styles ``tagged`` and ``plain`` have one conversation per turn. Other episodes have one, and a further one each
    time that the prompt limit made the conversation start again. The episode of a program (an agent that calls the policy
    through a chat API) has one for each chat request that no later request continues.
    """
    if trajectory.turns[0].call is not None:
        for index, turn in enumerate(trajectory.turns):
            if turn.call is not None and trajectory.successor(index) is None:
                yield [*turn.call.messages, json.loads(turn.action)["message"]]
        return
    config, tools = recording.config, recording.tools(trajectory)
    template = config.adapter_of(trajectory.environment).template(config.prompt_style)
    writer = MessageWriter(template, config.history_window)
    last: list[Message] = []
    for number, turn in enumerate(trajectory.turns):
        new = writer.write(shown(trajectory, turn), trajectory.turns[:number])
        if turn.messages:
            writer.conversation[-len(new) :] = json.loads(turn.messages)
        if last and len(writer.conversation) <= len(last):
            yield last
        writer.answer(recording.message(turn, tools))
        last = [*writer.conversation]
    if last:
        yield last


def write_messages(path: Path, target: Path, adapters: Sequence[EnvironmentAdapter] = ()) -> int:
    """Write the episodes of a run or of a recording as JSON lines, one per conversation; return the number of lines.

    A line has ``messages``, ``tools`` if there are any, and the episode's result.

    Raises:
        CheckpointError: ``path`` is neither a run nor a recording, or its config cannot be read.
        UserInputError: nothing was recorded, or ``target`` exists or cannot be written.
    """
    if target.exists():
        raise UserInputError(f"{target} exists. Name another file.")
    recording, lines = Recording(path, adapters), list[str]()
    for trajectory in recording.episodes():
        tools = recording.tools(trajectory)
        for messages in conversations(recording, trajectory):
            row = {
                "messages": messages,
                **({"tools": tools.schemas} if tools else {}),
                "return": trajectory.episode_return,
                "success": trajectory.success,
                "task_id": trajectory.task_id,
                "environment": trajectory.environment,
            }
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines), encoding="utf-8")
    return len(lines)
