"""Conversations in token ids: every prompt starts with the previous prompt and its response, exactly as sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import ConversationPrompt
from trial_ray.errors import PromptTooLongError
from trial_ray.prompts.chat_template import Around, TemplateOptions, encode_head, encode_untrusted, split_conversation
from trial_ray.prompts.writer import Prompt, PromptWriter, context_of
from trial_ray.trajectory import Turn


class ConversationBuilder(PromptWriter):
    """Writes prompts with the whole episode: role, task and response format, then observations and responses.

    Role, task and response format are the system message, or the head of the user's first message if the chat template
    does not delimit a system message.

    Prompt k+1 is prompt k, the ids of response k, the chat template's text between a response and the next message, the
    message, and the opening of the response. Nothing is decoded and tokenised again, and reasoning is kept even if the chat
    template would drop it from earlier responses. If a response does not end as the chat template closes it (it reached the
    length limit, or another stop token was sampled), the missing ids are added.

    If a prompt would exceed the token limit, the conversation starts again with role, task and response format and the last
    ``history_window`` turns, or as many of them as fit, with their ids unchanged. Later messages are appended to this shorter
    conversation.
    """

    template: ConversationPrompt

    def _split(self, options: TemplateOptions) -> None:
        self._parts = split_conversation(self._tokenizer, options)
        # Without a system message, the template's text before the user's first message is tokenised together with role and task.
        folded = self._parts.system is None
        ids = encode_untrusted(self._tokenizer, self._parts.first.lead_in) if folded else []
        self._lead_in = np.asarray(ids, np.int32)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens with which the chat template closes a response."""
        return self._parts.end_ids

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """Write the prompt of the next decision; the system message and the user's message are never truncated."""
        shown, later = self._shown(result, turns), self._parts.later
        if len(shown) > self._max_characters:
            raise self._message_too_long(result, None)
        message = np.asarray([*later.encode(self._tokenizer, shown), *self._parts.suffix_ids], np.int32)
        if turns:
            ids = np.concatenate([turns[-1].prompt_ids, self._answered(turns[-1], later), message])
            if len(ids) <= self.max_prompt_tokens:
                return self._prompt(ids, 0)
        beginning, num_past = self._beginning(result.task), len(turns)
        for num_dropped in range(max(0, num_past - self.history_window), num_past + 1):
            kept = turns[num_dropped:]
            parts = [part for turn in kept for part in (self._message(turn, beginning), self._answered(turn, later))]
            first, *others = [*parts, message]
            ids = np.concatenate([beginning, first[len(self._lead_in) :], *others])
            if len(ids) <= self.max_prompt_tokens:
                return self._prompt(ids, num_dropped)
        raise self._message_too_long(result, len(ids))

    def _shown(self, result: StepResult, turns: Sequence[Turn]) -> str:
        """Return the text of the user's message of the next turn."""
        return self.template.render(context_of(result, turns)).strip()

    def _system(self, task: str) -> str:
        """Return the text of role, task and response format."""
        return self.template.system(task).strip()

    def _beginning(self, task: str) -> np.ndarray:
        """Return the ids of role, task and response format, up to the user's first message."""
        parts, text = self._parts, self._system(task)
        if parts.system is None:
            return np.asarray([*parts.first.ids, *encode_head(self._tokenizer, parts.first, text)], np.int32)
        return np.asarray([*parts.system.ids, *parts.system.encode(self._tokenizer, text), *parts.first.ids], np.int32)

    def _message(self, turn: Turn, beginning: np.ndarray) -> np.ndarray:
        """Return the ids at the end of a turn's prompt: the turn's user message and the text between it and the response.

        If the message begins with role, task and response format, these are removed.
        """
        # The ids of a message contain no special token, so the last special token before the message's end opens the message.
        opens = np.flatnonzero(turn.prompt_ids[: turn.insert_at] == self._parts.first.ids[-1])[-1] + 1
        head = beginning[len(self._parts.first.ids) :]
        if self._parts.system is None and np.array_equal(turn.prompt_ids[opens : opens + len(head)], head):
            return np.concatenate([self._lead_in, turn.prompt_ids[opens + len(head) :]])
        return turn.prompt_ids[opens:]

    def _answered(self, turn: Turn, later: Around) -> np.ndarray:
        """Return the ids of a turn's response and of the text between it and the next message."""
        glue, ids = later.ids, turn.response_ids.tolist()
        written = next(number for number in range(len(glue), -1, -1) if ids[len(ids) - number :] == glue[:number])
        return np.concatenate([turn.response_ids, np.asarray(glue[written:], np.int32)])

    def _prompt(self, ids: np.ndarray, num_dropped: int) -> Prompt:
        return Prompt(
            ids.astype(np.int32, copy=False),
            len(ids) - len(self._parts.suffix_ids),
            "history" if num_dropped else "none",
        )

    def _message_too_long(self, result: StepResult, length: int | None) -> PromptTooLongError:
        return self._too_long(
            f"the task, an observation of {len(result.observation)} characters and its {len(result.admissible_actions)} "
            "admissible actions",
            length,
            ", or choose prompt_style='tagged', which shortens observations",
        )
