"""Conversations in token ids: every prompt begins with the one before it and its response, exactly as they were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from trial_ray.config.run import RunSettings
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.guarded import StepResult
from trial_ray.environments.templates import ConversationPrompt, PromptContext
from trial_ray.errors import PromptTooLongError
from trial_ray.rollout.chat_template import split_conversation
from trial_ray.rollout.hindsight import encode_untrusted
from trial_ray.rollout.prompts import Prompt, PromptBuilder, PromptWriter, too_long
from trial_ray.rollout.trajectory import Turn


def prompt_writer(tokenizer: Any, config: RunSettings, adapter: EnvironmentAdapter) -> PromptWriter:
    """The prompt writer of a run in one of its environments.

    Raises:
        ChatTemplateError: the tokenizer's chat template cannot be used in the style asked for.
    """
    template, limits = adapter.template(config.prompt_style), (config.max_prompt_tokens, config.history_window)
    if config.prompt_style == "conversation":
        return ConversationBuilder(tokenizer, cast(ConversationPrompt, template), *limits)
    return PromptBuilder(tokenizer, template, *limits)


class ConversationBuilder:
    """Writes prompts that hold the whole episode: the system message, then observations and responses in turn.

    Prompt k+1 is prompt k, the ids of response k, what the chat template writes between a response and the next message, the
    message, and the opening of the response. Nothing is decoded and tokenised again. A response that did not end with the
    chat template's own token (its length ran out, or another stop token was sampled) is closed with that token.

    A prompt over the limit starts the conversation again: with the system message and the last ``history_window`` turns, or as
    many of them as fit, whole and with their ids. What follows is appended to it.

    Args:
        tokenizer: a ``transformers`` tokenizer with a chat template.
        template: writes the messages and reads the responses.
        max_prompt_tokens: most ids in a prompt.
        history_window: turns that are kept, at most, where the conversation starts again.

    Raises:
        ChatTemplateError: see :func:`~trial_ray.rollout.chat_template.split_conversation`.
    """

    def __init__(
        self, tokenizer: Any, template: ConversationPrompt, max_prompt_tokens: int, history_window: int = 2
    ) -> None:
        self.template = template
        self.max_prompt_tokens = max_prompt_tokens
        self.history_window = history_window
        self._tokenizer = tokenizer
        self._parts = split_conversation(tokenizer)
        # No token spells more characters than its vocabulary entry has, see PromptBuilder.
        self._most_characters = max_prompt_tokens * max(map(len, tokenizer.get_vocab()))

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """The prompt of the next decision.

        Args:
            result: what the environment shows and offers now.
            turns: the turns so far, oldest first, with prompts that this class wrote.

        Raises:
            PromptTooLongError: system message and the user's message alone exceed the limit.
        """
        context = PromptContext(result.task, result.observation.strip(), result.admissible_actions, (), len(turns) + 1)
        message = self._parts.first.lead_in + self.template.render(context).strip()
        if len(message) > self._most_characters:
            raise self._too_long(result, None)
        end = np.asarray([*encode_untrusted(self._tokenizer, message), *self._parts.suffix_ids], np.int32)
        if turns:
            ids = np.concatenate([turns[-1].prompt_ids, self._answered(turns[-1]), end])
            if len(ids) <= self.max_prompt_tokens:
                return self._prompt(ids, 0)
        for num_kept in range(min(self.history_window, len(turns)), -1, -1):
            ids = np.concatenate([*self._opening(result.task, turns[len(turns) - num_kept :]), end])
            if len(ids) <= self.max_prompt_tokens:
                return self._prompt(ids, len(turns) - num_kept)
        raise self._too_long(result, len(ids))

    def _opening(self, task: str, turns: Sequence[Turn]) -> list[np.ndarray]:
        """A conversation of these turns, up to the next message."""
        parts = self._parts
        system = encode_untrusted(self._tokenizer, parts.system.lead_in + self.template.system(task).strip())
        opening = [np.asarray([*parts.system.ids, *system, *parts.first.ids], np.int32)]
        for turn in turns:
            opening += [self._message(turn), self._answered(turn)]
        return opening

    def _message(self, turn: Turn) -> np.ndarray:
        """Ids of a turn's own message with what follows it, as they stand at the end of its prompt."""
        # Messages hold no special tokens, so the last one before the end of the message is the one that opens it.
        opens = np.flatnonzero(turn.prompt_ids[: turn.insert_at] == self._parts.first.ids[-1])
        return turn.prompt_ids[opens[-1] + 1 :]

    def _answered(self, turn: Turn) -> np.ndarray:
        """Ids of a turn's response and of all that stands between it and the next message."""
        glue = self._parts.later.ids
        closed = len(turn.response_ids) > 0 and turn.response_ids[-1] == glue[0]
        return np.concatenate([turn.response_ids, np.asarray(glue[1:] if closed else glue, np.int32)])

    def _prompt(self, ids: np.ndarray, num_cut: int) -> Prompt:
        return Prompt(ids.astype(np.int32, copy=False), len(ids) - len(self._parts.suffix_ids), num_cut, False)

    def _too_long(self, result: StepResult, length: int | None) -> PromptTooLongError:
        return too_long(
            f"the task, an observation of {len(result.observation)} characters and its {len(result.admissible_actions)} "
            "admissible actions",
            length,
            self.max_prompt_tokens,
            ", or choose prompt_style='tagged', which shortens observations",
        )
