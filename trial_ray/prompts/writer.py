"""The base class of prompt writers, and the errors of prompts that exceed the limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trial_envs.core.projection import Projection
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import PromptTemplate
from trial_ray.errors import PromptTooLongError
from trial_ray.prompts.chat_template import DEFAULT_OPTIONS, TemplateOptions
from trial_ray.prompts.responses import ResponseTexts
from trial_ray.trajectory import PromptCut, Turn


@dataclass(frozen=True, slots=True)
class Prompt:
    """One ordinary prompt P_k.

    Attributes:
        ids: int32 ``[P]``, chat template included, up to the start of the response.
        insert_at: index in ``ids`` of the first token after the user's message (post-action teacher context is inserted
            before it).
        cut: parts dropped because of the length; if a part of the observation was dropped, all history was dropped, too.
    """

    ids: np.ndarray
    insert_at: int
    cut: PromptCut


class PromptWriter(ABC):
    """Writes the prompts of an episode, for one tokenizer and one template.

    Args:
        tokenizer: a ``transformers`` tokenizer with a chat template.
        template: writes the messages and reads the responses.
        max_prompt_tokens: maximum number of ids in a prompt.
        history_window: maximum number of earlier turns in a prompt that cannot contain the whole episode.
        options: arguments of the chat template.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template alters, repeats or does not delimit messages.
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
        # A token has at most as many characters as its vocabulary entry, so a message with more characters exceeds the limit.
        self._max_characters = max_prompt_tokens * max(map(len, tokenizer.get_vocab()))
        self._split(options)

    @abstractmethod
    def _split(self, options: TemplateOptions) -> None:
        """Split off the text that the chat template writes around messages."""

    @abstractmethod
    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """Write the prompt of the next decision.

        Args:
            result: the environment's current result.
            turns: the turns so far, oldest first, with prompts written by this class.

        Raises:
            PromptTooLongError: the prompt exceeds the limit even without all parts that may be dropped.
        """

    def read(self, prompt: Prompt, response_ids: np.ndarray) -> Projection:
        """Read the action from the response to a prompt.

        Args:
            prompt: prompt written by this class.
            response_ids: int32 ``[y]``, as sampled.
        """
        return self.template.project(self.responses.text(prompt.ids, prompt.insert_at, response_ids))


def too_long(parts: str, length: int | None, limit: int, advice: str = "") -> PromptTooLongError:
    """Return the error for a prompt that exceeds the limit even with only the parts that are never truncated.

    Args:
        parts: names of these parts.
        length: tokens of the prompt with only these parts; ``None`` if they were not counted, because the number of
            characters shows that the prompt exceeds the limit.
        limit: ``max_prompt_tokens``.
        advice: remedies other than a higher limit.
    """
    counted = f"{length}" if length is not None else f"more than {limit}"
    return PromptTooLongError(
        f"{parts} alone make {counted} tokens, more than max_prompt_tokens={limit}; raise it{advice}"
    )


def require_first_prompt(writer: PromptWriter, shown: StepResult, environment: str, task_id: str) -> None:
    """Require that the first prompt of a task does not exceed the limit.

    Args:
        writer: prompt writer of the run.
        shown: the environment's result at the start of the task.
        environment: name of the environment.
        task_id: id of the task.

    Raises:
        PromptTooLongError: the prompt exceeds the limit; the message contains environment, task, length and limit.
    """
    try:
        writer.write(shown, ())
    except PromptTooLongError as error:
        raise PromptTooLongError(located(error, environment, task_id, 1)) from error


def located(error: PromptTooLongError, environment: str, task_id: str, turn: int) -> str:
    """Return an error's message with environment, task and turn."""
    return f"{environment}, task {task_id!r}, turn {turn}: {error}"


def records(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """Return (observation, action) of each turn."""
    return [(turn.observation, turn.action) for turn in turns]
