"""Prompts in token ids: every turn a prompt of its own, and what is cut when it does not fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trial_envs.core.projection import Projection
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
        cut: what was left out for its length; where that is a part of the observation, no history is left.
    """

    ids: np.ndarray
    insert_at: int
    cut: PromptCut


class PromptWriter(ABC):
    """Writes the prompts of an episode, for one tokenizer and one template.

    Args:
        tokenizer: a ``transformers`` tokenizer with a chat template.
        template: writes the messages and reads the responses.
        max_prompt_tokens: most ids in a prompt.
        history_window: turns before the present one that a prompt shows, at most, where it cannot hold the whole episode.
        options: what the chat template is rendered with.

    Raises:
        ChatTemplateError: no chat template, or one that alters, repeats or does not delimit messages.
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
        # No token spells more characters than its vocabulary entry has: a longer message need not be tokenised to see
        # that it is over the limit.
        self._most_characters = max_prompt_tokens * max(map(len, tokenizer.get_vocab()))
        self._split(options)

    @abstractmethod
    def _split(self, options: TemplateOptions) -> None:
        """Find what the chat template writes around messages."""

    @abstractmethod
    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """The prompt of the next decision.

        Args:
            result: what the environment shows and offers now.
            turns: the turns so far, oldest first, with prompts that this class wrote.

        Raises:
            PromptTooLongError: the prompt exceeds the limit even with all that may be cut left out.
        """

    def read(self, prompt: Prompt, response_ids: np.ndarray) -> Projection:
        """The action in the response to a prompt.

        Args:
            prompt: that this class wrote.
            response_ids: int32 ``[y]``, as sampled.
        """
        return self.template.project(self.responses.text(prompt.ids, prompt.insert_at, response_ids))


class PromptBuilder(PromptWriter):
    """Writes prompts that stand alone, with the last records of the history in the user's message.

    The chat template is rendered once; what stands around the user's message is tokenised once, and a prompt costs one
    tokenisation of its message. The ids equal those of the whole rendered conversation (checked on construction),
    except that special tokens spelled in a message stay ordinary text.
    """

    def _split(self, options: TemplateOptions) -> None:
        self._around, self._suffix_ids = split_user_message(self._tokenizer, options)

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """See :class:`PromptWriter`."""
        return self.build(
            task=result.task,
            observation=result.observation,
            admissible_actions=result.admissible_actions,
            history=records(turns),
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
            if (prompt := self._prompt(context, "history" if num_cut else "none")) is not None:
                return prompt
        return self._cut_observation(context)

    def _cut_observation(self, context: PromptContext) -> Prompt:
        """The prompt with as much of the observation's both ends as fits; bisection over the characters kept."""
        observation = context.observation

        def keeping(characters: int) -> Prompt | None:
            head, tail = characters - characters // 2, characters // 2
            kept = observation[:head] + CUT_MARK + observation[len(observation) - tail :]
            return self._prompt(replace(context, observation=kept), "observation")

        if (fitting := keeping(0)) is None:
            ids = self._ids(replace(context, observation=min(observation, CUT_MARK, key=len)))
            raise too_long(
                f"the task, the {len(context.admissible_actions)} admissible actions and the instructions",
                None if ids is None else len(ids),
                self.max_prompt_tokens,
            )
        low, high = 0, min(len(observation), self._most_characters)
        while high - low > 1:
            middle = (low + high) // 2
            if (longer := keeping(middle)) is not None:
                low, fitting = middle, longer
            else:
                high = middle
        return fitting

    def _prompt(self, context: PromptContext, cut: PromptCut) -> Prompt | None:
        """The prompt; ``None`` where it would exceed the limit."""
        ids = self._ids(context)
        if ids is None or len(ids) > self.max_prompt_tokens:
            return None
        return Prompt(np.asarray(ids, np.int32), len(ids) - len(self._suffix_ids), cut)

    def _ids(self, context: PromptContext) -> list[int] | None:
        """Ids of a prompt of any length; ``None`` where its characters show that it exceeds the limit."""
        message = self.template.render(context).strip()
        if len(message) > self._most_characters:
            return None
        return [*self._around.ids, *self._around.encode(self._tokenizer, message), *self._suffix_ids]


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
