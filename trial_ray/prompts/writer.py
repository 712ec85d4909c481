"""The base class of prompt writers, the decoding of responses, and the writer of chat messages."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from trial_envs.core.projection import Projection
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import CONVERSATIONS, ConversationPrompt, PromptContext, PromptTemplate
from trial_ray.errors import ChatTemplateError, PromptTooLongError
from trial_ray.models.model_shape import special_token_ids, spell_unknown
from trial_ray.prompts.chat_template import REASONING_TAGS, TemplateOptions, encode_untrusted
from trial_ray.trajectory import PromptCut, Turn

DEFAULT_OPTIONS = TemplateOptions()
# Chat templates of reasoning models may end a prompt with <think>.
_OPENING = re.compile(r"<think>\s*\Z")
_TAGS = re.compile("(</?think>)")


class ResponseTexts:
    """Decodes responses, together with a ``<think>`` tag at the end of the prompt.

    Chat templates of reasoning models may end a prompt with ``<think>``, so that the response starts inside a think element. The
    tag belongs to the response when its text is shown or its format is checked, and to the prompt in ids, masks and losses. An
    element that the prompt itself closes, such as the empty ``<think>\\n\\n</think>`` of a disabled reasoning mode, belongs to
    the prompt.

    Args:
        tokenizer: the policy's ``transformers`` tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        tags = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if str(token) in REASONING_TAGS}
        self._dropped = special_token_ids(tokenizer) - tags
        self._openings: dict[bytes, str] = {}

    def text(self, prompt_ids: np.ndarray, insert_at: int, response_ids: np.ndarray) -> str:
        """Decode a response, with a ``<think>`` that its prompt opened, and without special tokens except reasoning tags.

        Args:
            prompt_ids: int32 ``[P]``, the prompt.
            insert_at: index in ``prompt_ids`` of the end of the user's message.
            response_ids: int ``[y]``, the response; :func:`spell_unknown` writes ids outside the tokenizer's vocabulary.
        """
        return self.opening(prompt_ids, insert_at) + self._spelled(response_ids, self._dropped)

    def reasoning_tokens(self, prompt_ids: np.ndarray, insert_at: int, response_ids: np.ndarray) -> int:
        """Return the number of tokens up to ``</think>`` (all if it is missing) in a response with reasoning; else 0.

        Arguments as in :meth:`text`.
        """
        # Decode only the first tokens: most turns have no reasoning, and this method is called in every turn.
        if not self.text(prompt_ids, insert_at, response_ids[:8]).lstrip().startswith("<think>"):
            return 0
        lengths = range(len(response_ids))
        return bisect_left(lengths, True, key=lambda length: "</think>" in self.whole(response_ids[:length]))

    def whole(self, response_ids: np.ndarray) -> str:
        """Decode a response with all its special tokens, but without a ``<think>`` tag at the end of its prompt.

        ``response_ids`` is as in :meth:`text`.
        """
        return self._spelled(response_ids, frozenset())

    def _spelled(self, ids: np.ndarray, dropped: Collection[int]) -> str:
        texts, known = list[str](), list[int]()
        for token in ids.tolist():
            if not 0 <= token < self._size:
                texts += [self.decode(known), spell_unknown(token)]
                known = []
            elif token not in dropped:
                known.append(token)
        return "".join([*texts, self.decode(known)])

    def opening(self, prompt_ids: np.ndarray, insert_at: int) -> str:
        """Return the ``<think>`` at the end of a prompt, or an empty text without one; arguments as in :meth:`text`."""
        suffix = np.asarray(prompt_ids[insert_at:], np.int32)
        key = suffix.tobytes()
        if key not in self._openings:
            match = _OPENING.search(self.decode(suffix.tolist()))
            self._openings[key] = match[0] if match else ""
        return self._openings[key]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, with special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ordinary prompt of a turn (P_k in the TRIAL paper).

    Attributes:
        ids: int32 ``[P]``, chat template included, up to the start of the response.
        insert_at: index in ``ids`` of the first token after the user's message. A teacher context is inserted before this token,
            unless its frame puts it in front of the whole prompt.
        cut: the part of the prompt that was dropped to fit the token limit; if it is the observation, all history was dropped, too.
        tools: schemas of the tools that an agent program's chat request offers; empty in environments without a program.
    """

    ids: np.ndarray
    insert_at: int
    cut: PromptCut
    tools: Sequence[dict[str, Any]] = ()


class PromptWriter(ABC):
    """Writes the prompts of an episode, for one tokenizer and one template.

    Args:
        tokenizer: a ``transformers`` tokenizer with a chat template.
        template: template that writes the messages and reads the responses.
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
        """Compute and store the text that the chat template writes around messages."""

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

    def encode(self, prompt: Prompt, text: str) -> np.ndarray:
        """Return the ids of a response, as a policy would sample them: int32 ``[y]``, the end token included.

        Control tokens that ``text`` spells are encoded as ordinary text, except for reasoning tags.

        Args:
            prompt: prompt written by this class.
            text: text of the response; if the prompt opens reasoning and the text has none, the reasoning is closed first.
        """
        if opened := self.responses.opening(prompt.ids, prompt.insert_at):
            if text.startswith(opened):
                text = text.removeprefix(opened)
            else:
                text = text.removeprefix("<think>") if text.startswith("<think>") else f"\n</think>\n\n{text}"
        added = self._tokenizer.get_added_vocab()
        ids: list[int] = []
        for part in _TAGS.split(text) if "</think>" in added else [text]:
            ids += (
                [added[part]] if part in REASONING_TAGS and part in added else encode_untrusted(self._tokenizer, part)
            )
        return np.asarray([*ids, min(self.end_ids)], np.int32)

    def _too_long(self, parts: str, length: int | None, advice: str = "") -> PromptTooLongError:
        """Return the error for a prompt that exceeds the limit even with only the parts that are never truncated.

        Args:
            parts: names of the parts that are never truncated.
            length: number of tokens of the prompt with only these parts; ``None`` if they were not counted, because the number
                of characters shows that the prompt exceeds the limit.
            advice: remedies other than a higher limit.
        """
        limit = self.max_prompt_tokens
        counted = f"{length}" if length is not None else f"more than {limit}"
        return PromptTooLongError(
            f"{parts} alone make {counted} tokens, more than max_prompt_tokens={limit}; raise it{advice}"
        )

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens with which a response ends."""
        return frozenset([int(self._tokenizer.eos_token_id)])

    def require_end(self, stop_ids: Sequence[int]) -> None:
        """Require that the chat template ends a response with one of the model's stop tokens.

        Args:
            stop_ids: stop tokens of the model.

        Raises:
            ChatTemplateError: the chat template ends a response with another token; the message contains the tokens.
        """
        if self.end_ids.isdisjoint(stop_ids):
            written, known = (self._tokenizer.convert_ids_to_tokens(sorted(ids)) for ids in (self.end_ids, stop_ids))
            raise ChatTemplateError(
                f"The chat template ends a response with {' '.join(written)}, expected one of the model's stop tokens "
                f"({' '.join(map(str, known)) or 'none'}): the policy would continue and write the user's next message itself. Add "
                f"the id of {written[0]}, {min(self.end_ids)}, to eos_token_id in the model's generation_config.json, or use "
                "prompt_style='tagged'."
            )


def located(error: PromptTooLongError, environment: str, task_id: str, turn: int) -> str:
    """Return an error's message with environment, task and turn."""
    return f"{environment}, task {task_id!r}, turn {turn}: {error}"


def context_of(result: StepResult, turns: Sequence[Turn], past: Sequence[tuple[str, str]] = ()) -> PromptContext:
    """Return what a template shows in the message of the next turn.

    Args:
        result: the environment's current result.
        turns: the turns so far, oldest first.
        past: (observation, action) of the earlier steps that the message shows.
    """
    step = len(records(turns)) + 1
    return PromptContext(result.task, result.observation.strip(), result.admissible_actions, past, step)


def answer_texts(template: PromptTemplate, result: StepResult, turns: Sequence[Turn]) -> list[str]:
    """Return messages with the answers to the last turn's actions, except the last answer, which is in ``result``.

    Args:
        template: template that writes the messages.
        result: the environment's current result.
        turns: the turns so far, oldest first.
    """
    answers = turns[-1].answers[:-1] if turns else ()
    return [
        template.render(PromptContext(result.task, answer.strip(), (), (), step)).strip()
        for step, answer in enumerate(answers, len(records(turns[:-1])) + 2)
    ]


def records(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """Return (observation, action) for each step of the environment in these turns."""
    return [pair for turn in turns for pair in zip((turn.observation, *turn.answers), turn.all_actions, strict=False)]


Message = dict[str, Any]
"""A message of the chat API: ``role``, ``content``, and ``tool_calls`` in a response that calls tools."""


@dataclass
class MessageWriter:
    """Writes the chat messages of one episode; in a conversation it keeps them for later turns.

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
