"""Prompts in token ids: every turn a prompt of its own, and what is cut when it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from trial_ray.environments.guarded import StepResult
from trial_ray.environments.templates import PromptContext, PromptTemplate
from trial_ray.errors import PromptTooLongError
from trial_ray.rollout.chat_template import DEFAULT_OPTIONS, TemplateOptions, split_user_message
from trial_ray.rollout.response_texts import ResponseTexts
from trial_ray.rollout.trajectory import PromptCut, Turn

CUT_MARK = " [cut] "


@dataclass(frozen=True, slots=True)
class Prompt:
    """One ordinary prompt P_k.

    Attributes:
        ids: int32 ``[P]``, chat template included, up to where the response starts.
        insert_at: index in ``ids`` of the first token after the user's message (post-action evidence goes before it).
        num_cut_records: history records left out for length: of those inside the window, or of a conversation's.
        cut_observation: whether the middle of the observation was left out for length.
    """

    ids: np.ndarray
    insert_at: int
    num_cut_records: int
    cut_observation: bool

    @property
    def cut(self) -> PromptCut:
        """The part that was truncated, in one word; a truncated observation stands alone, without history."""
        if self.cut_observation:
            return "observation"
        return "history" if self.num_cut_records else "none"


class PromptWriter(Protocol):
    """Writes the prompts of an episode, for one tokenizer and one template."""

    @property
    def template(self) -> PromptTemplate:
        """Writes the messages and reads the responses."""
        ...

    @property
    def responses(self) -> ResponseTexts:
        """Decodes the responses."""
        ...

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """The prompt of the next decision.

        Args:
            result: what the environment shows and offers now.
            turns: the turns so far, oldest first.

        Raises:
            PromptTooLongError: the prompt exceeds the limit even with all that may be cut left out.
        """
        ...


class PromptBuilder:
    """Writes prompts that stand alone, with the last records of the history in the user's message.

    The chat template is rendered once; what stands around the user's message is tokenised once, and a prompt costs one
    tokenisation of its message. The ids equal those of the whole rendered conversation (checked on construction),
    except that special tokens spelled in a message stay ordinary text.

    Args:
        tokenizer: a ``transformers`` tokenizer with a chat template.
        template: writes the user's message and reads the response.
        max_prompt_tokens: most ids in a prompt.
        history_window: (observation, action) pairs shown.
        options: what the chat template is rendered with.

    Raises:
        ChatTemplateError: no chat template, or one that alters, repeats or does not delimit the user's message.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: PromptTemplate,
        max_prompt_tokens: int,
        history_window: int = 2,
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.template = template
        self.max_prompt_tokens = max_prompt_tokens
        self.history_window = history_window
        self.responses = ResponseTexts(tokenizer)
        self._tokenizer = tokenizer
        self._around, self._suffix_ids = split_user_message(tokenizer, options)
        # No token spells more characters than its vocabulary entry has: a longer message need not be tokenised to see
        # that it is over the limit.
        self._most_characters = max_prompt_tokens * max(map(len, tokenizer.get_vocab()))

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """The prompt of the next decision; see :class:`PromptWriter`."""
        return self.build(
            task=result.task,
            observation=result.observation,
            admissible_actions=result.admissible_actions,
            history=records(turns[max(0, len(turns) - self.history_window) :]),
            step=len(turns) + 1,
        )

    def build(
        self,
        *,
        task: str,
        observation: str,
        admissible_actions: Sequence[str],
        history: Sequence[tuple[str, str]],
        step: int,
    ) -> Prompt:
        """Write the prompt of one decision.

        Over the limit, the oldest history records go first, then the middle of the observation; the task and the
        actions are never cut.

        Args:
            task: the instruction (``info["task"]``).
            observation: what the environment shows now, task included where the environment states it.
            admissible_actions: ``info["admissible_actions"]``.
            history: (observation, action) of the turns so far, oldest first; only the last ``history_window`` are used.
            step: number of this decision, from 1.

        Raises:
            PromptTooLongError: the prompt exceeds the limit even without history and observation.
        """
        window, shown = history[max(0, len(history) - self.history_window) :], observation.strip()
        for num_cut in range(len(window) + 1):
            context = PromptContext(task, shown, admissible_actions, window[num_cut:], step)
            message_ids = self._encode(context)
            if message_ids is not None:
                return self._assemble(message_ids, num_cut, False)
        return self._assemble(self._cut_observation(context), len(window), True)

    def _cut_observation(self, context: PromptContext) -> list[int]:
        """The message with as much of the observation's both ends as fits; bisection over the characters kept."""
        observation = context.observation

        def keeping(characters: int) -> list[int] | None:
            head, tail = characters - characters // 2, characters // 2
            kept = observation[:head] + CUT_MARK + observation[len(observation) - tail :]
            return self._encode(replace(context, observation=kept))

        fitting = keeping(0)
        if fitting is None:
            raise self._too_long(replace(context, observation=min(observation, CUT_MARK, key=len)))
        low, high = 0, min(len(observation), self._most_characters)
        while high - low > 1:
            middle = (low + high) // 2
            message_ids = keeping(middle)
            if message_ids is not None:
                low, fitting = middle, message_ids
            else:
                high = middle
        return fitting

    def _too_long(self, shortest: PromptContext) -> PromptTooLongError:
        message = self._message(shortest)
        length = None
        if len(message) <= self._most_characters:
            message_ids = self._around.encode(self._tokenizer, message)
            length = len(self._around.ids) + len(message_ids) + len(self._suffix_ids)
        return too_long(
            f"the task, the {len(shortest.admissible_actions)} admissible actions and the instructions",
            length,
            self.max_prompt_tokens,
        )

    def _message(self, context: PromptContext) -> str:
        return self.template.render(context).strip()

    def _encode(self, context: PromptContext) -> list[int] | None:
        """Ids of the message, or ``None`` when the prompt would exceed the limit."""
        message = self._message(context)
        if len(message) > self._most_characters:
            return None
        ids = self._around.encode(self._tokenizer, message)
        return ids if len(self._around.ids) + len(ids) + len(self._suffix_ids) <= self.max_prompt_tokens else None

    def _assemble(self, message_ids: list[int], num_cut_records: int, cut_observation: bool) -> Prompt:
        ids = np.asarray([*self._around.ids, *message_ids, *self._suffix_ids], dtype=np.int32)
        return Prompt(ids, len(ids) - len(self._suffix_ids), num_cut_records, cut_observation)


def too_long(parts: str, length: int | None, limit: int, advice: str = "") -> PromptTooLongError:
    """The error of a prompt whose parts that are never cut exceed the limit.

    Args:
        parts: names them.
        length: of the prompt that they make, in tokens; ``None`` where it was not counted, because its characters show that it is
            over the limit.
        limit: ``max_prompt_tokens``.
        advice: what can be done besides raising the limit.
    """
    counted = f"{length}" if length is not None else f"more than {limit}"
    return PromptTooLongError(
        f"{parts} alone make {counted} tokens, more than max_prompt_tokens={limit}; raise it{advice}"
    )


def require_first_prompt(writer: PromptWriter, shown: StepResult, environment: str, task_id: str) -> None:
    """Refuse a limit that the first prompt of a task exceeds.

    Args:
        writer: of the run's prompts.
        shown: what the environment shows at the beginning of the task.
        environment: its name.
        task_id: of the task.

    Raises:
        PromptTooLongError: names environment, task, length and limit.
    """
    try:
        writer.write(shown, ())
    except PromptTooLongError as error:
        raise PromptTooLongError(located(error, environment, task_id, 1)) from error


def located(error: PromptTooLongError, environment: str, task_id: str, turn: int) -> str:
    """An error's message, with the place where it was raised."""
    return f"{environment}, task {task_id!r}, turn {turn}: {error}"


def records(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """(observation, action) of turns."""
    return [(turn.observation, turn.action) for turn in turns]
