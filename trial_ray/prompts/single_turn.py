"""Single-turn prompts: a separate prompt for every turn, truncated if it exceeds the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import PromptContext
from trial_ray.prompts.chat_template import TemplateOptions, split_user_message
from trial_ray.prompts.teacher_context import CUT_MARK
from trial_ray.prompts.writer import Prompt, PromptWriter, context_of, records
from trial_ray.trajectory import PromptCut, Turn


class PromptBuilder(PromptWriter):
    """Writes a separate prompt for each turn, with the last ``history_window`` turns in the user's message.

    The chat template is rendered once, and the text around the user's message is tokenised once, so a prompt costs one
    tokenisation of its message. The ids equal the ids of the whole rendered conversation (checked on construction), except
    that the text of a special token in a message is encoded as ordinary text.
    """

    def _split(self, options: TemplateOptions) -> None:
        self._around, self._suffix_ids = split_user_message(self._tokenizer, options)

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """Write the prompt of the next decision, with the last ``history_window`` actions and their observations.

        If the prompt exceeds the limit, the oldest actions are dropped first, then the middle of the current observation; the
        task and the admissible actions are never truncated.

        Raises:
            PromptTooLongError: the prompt exceeds the limit even without history and observation.
        """
        past = records(turns)
        window = past[max(0, len(past) - self.history_window) :]
        for num_dropped in range(len(window) + 1):
            context = context_of(result, turns, window[num_dropped:])
            if (prompt := self._prompt(context, "history" if num_dropped else "none")) is not None:
                return prompt
        return self._cut_observation(context)

    def _cut_observation(self, context: PromptContext) -> Prompt:
        """Return the prompt with as much of the observation's start and end as fits, found by bisection over characters."""
        observation = context.observation

        def prompt_with(characters: int) -> Prompt | None:
            head, tail = characters - characters // 2, characters // 2
            kept = observation[:head] + CUT_MARK + observation[len(observation) - tail :]
            return self._prompt(replace(context, observation=kept), "observation")

        if (fitting := prompt_with(0)) is None:
            ids = self._ids(replace(context, observation=min(observation, CUT_MARK, key=len)))
            raise self._too_long(
                f"the task, the {len(context.admissible_actions)} admissible actions and the instructions",
                None if ids is None else len(ids),
            )
        low, high = 0, min(len(observation), self._max_characters)
        while high - low > 1:
            middle = (low + high) // 2
            if (longer := prompt_with(middle)) is not None:
                low, fitting = middle, longer
            else:
                high = middle
        return fitting

    def _prompt(self, context: PromptContext, cut: PromptCut) -> Prompt | None:
        """Return the prompt, or ``None`` if it would exceed the limit."""
        ids = self._ids(context)
        if ids is None or len(ids) > self.max_prompt_tokens:
            return None
        return Prompt(np.asarray(ids, np.int32), len(ids) - len(self._suffix_ids), cut)

    def _ids(self, context: PromptContext) -> list[int] | None:
        """Return the ids of a prompt of any length, or ``None`` if its number of characters shows that it exceeds the limit."""
        message = self.template.render(context).strip()
        if len(message) > self._max_characters:
            return None
        return [*self._around.ids, *self._around.encode(self._tokenizer, message), *self._suffix_ids]
