"""Chat messages of an episode, with the same texts as in the prompts of a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import CONVERSATIONS, ConversationPrompt, PromptTemplate
from trial_ray.prompts.writer import answer_texts, context_of, records
from trial_ray.trajectory import Turn

Message = dict[str, Any]
"""A message of the chat API: ``role``, ``content``, and ``tool_calls`` in a response that calls tools."""


@dataclass
class MessageWriter:
    """Writes the messages of one episode; in a conversation it keeps them for later turns.

    Attributes:
        template: template that writes the texts.
        history_window: number of earlier turns in a message of the styles ``tagged`` and ``plain``.
        conversation: messages of the conversation so far.
    """

    template: PromptTemplate
    history_window: int
    conversation: list[Message] = field(default_factory=list)

    def write(self, result: StepResult, history: Sequence[Turn]) -> list[Message]:
        """Return the messages of a new turn, and add them to ``conversation``.

        Args:
            result: the environment's current result.
            history: the turns so far, oldest first.
        """
        template, is_conversation = self.template, self.template.style in CONVERSATIONS
        past = [] if is_conversation or not self.history_window else records(history)[-self.history_window :]
        context = context_of(result, history, tuple(past))
        new: list[Message] = []
        role, texts = "user", [template.render(context).strip()]
        if not is_conversation:
            self.conversation.clear()
        elif not self.conversation:
            system = cast(ConversationPrompt, template).system(result.task).strip()
            new.append({"role": "system", "content": system})
        elif template.style == "tools":
            role, texts = "tool", [*answer_texts(template, result, history), *texts]
        new += [{"role": role, "content": text} for text in texts]
        self.conversation += new
        return new

    def answer(self, message: Message) -> None:
        """Add a response to the conversation."""
        self.conversation.append(message)
