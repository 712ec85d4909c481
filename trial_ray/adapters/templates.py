"""Prompt templates: text of an environment's prompts, and the format of responses that they request.

A template is an object with a ``style``, a ``render`` that writes the user's message, and a ``project`` that reads the action
from the response; a template for conversations also has a ``system``. The templates below are frozen dataclasses. An
environment's adapter contains its own templates.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

from trial_envs.core.projection import Projection, project_action
from trial_ray.errors import ConfigError

PromptStyle = Literal["tagged", "plain", "conversation", "tools"]
"""With ``tagged`` and ``plain``, each turn has its own prompt; with ``conversation`` and ``tools``, an episode is one
conversation. A response is a bare action with ``plain``, calls tools with ``tools``, and has tags otherwise."""
ToolFormat = Literal["hermes"]
"""Text formats for tool descriptions and tool calls that can replace the chat template's own format."""


@dataclass(frozen=True, slots=True)
class PromptContext:
    """Parts of one prompt.

    Attributes:
        task: instruction, one sentence.
        observation: the current observation.
        admissible_actions: admissible actions, in the environment's order.
        history: the last (observation, action) pairs, oldest first. Empty in a conversation, since its prompt already contains
            them, except when a conversation with tools restarts.
        step: number of this turn, from 1.
    """

    task: str
    observation: str
    admissible_actions: Sequence[str]
    history: Sequence[tuple[str, str]]
    step: int


class PromptTemplate(Protocol):
    """Template that writes the user's message and reads the action from the response."""

    @property
    def style(self) -> PromptStyle:
        """Form of the prompt and of the requested response."""
        ...

    def render(self, context: PromptContext) -> str:
        """Write the user's message."""
        ...

    def project(self, response: str) -> Projection:
        """Read the action from a response (special tokens removed)."""
        ...


class ConversationPrompt(PromptTemplate, Protocol):
    """Template of the styles ``"conversation"`` and ``"tools"``.

    ``render`` writes the message of one turn, which later turns do not change.
    """

    def system(self, task: str) -> str:
        """Write the system message (task and form of responses), which is the same in every turn."""
        ...


@dataclass(frozen=True)
class TaggedTemplate:
    """Prompts in full sentences for instruct models, which reason inside ``<think>`` and act inside ``<action>``.

    Every message contains the task, the current observation and the admissible actions. Messages after the first also contain
    the past observations and actions in ``history``, because every turn is a separate conversation.

    Attributes:
        role: opening sentence.
        hidden_actions: admissible actions that prompts do not list.
        dropped: regular expression of repeated text that is removed from observations, such as the task on every page.
        tail: number of characters at the end of a response without action tags that are read as its action.
        keep_case: whether the action keeps its case; otherwise it is lower-cased.
    """

    role: str
    hidden_actions: frozenset[str] = frozenset()
    dropped: str | None = None
    tail: int = 30
    keep_case: bool = False

    style: ClassVar[PromptStyle] = "tagged"

    def render(self, context: PromptContext) -> str:
        """Write the message in full sentences."""
        parts, observation = [self.role], self._shown(context.observation)
        # The first prompt needs no separate task if its observation, which may be truncated, contains the task.
        if context.task and (context.step > 1 or context.task not in observation):
            parts.append(f"Your task: {context.task}")
        if context.step > 1:
            parts.append(self.past(context))
        parts += (now := self.now(context))
        request = "exactly one of the actions listed above" if len(now) > 1 else "your action"
        parts.append(
            "Decide what to do next. Begin with your reasoning about the situation and the goal, enclosed in <think> "
            f"and </think>. Then give {request}, enclosed in <action> and </action>."
        )
        return "\n\n".join(parts)

    def project(self, response: str) -> Projection:
        """Return the text between the action tags; see :func:`trial_envs.core.projection.project_action`."""
        return project_action(response, "tagged", self.tail, self.keep_case)

    def now(self, context: PromptContext) -> list[str]:
        """Return the paragraphs of the current turn only: the observation, and the admissible actions if there are any."""
        paragraphs = [f"This is step {context.step}. The environment shows:\n{self._shown(context.observation)}"]
        offered = "\n".join(action for action in context.admissible_actions if action not in self.hidden_actions)
        if offered:
            paragraphs.append(f"Actions that you can take now:\n{offered}")
        return paragraphs

    def past(self, context: PromptContext) -> str:
        """Return the paragraph about the steps so far, with the last observations and actions."""
        lines = [f"Steps taken so far: {context.step - 1}."]
        if context.history:
            lines.append("The most recent ones, oldest first:")
        for number, (observation, action) in enumerate(context.history, context.step - len(context.history)):
            shown = self._shown(observation)
            lines.append(f"[step {number}] The environment showed: {shown}\n[step {number}] You did: {action}")
        return "\n".join(lines)

    def _shown(self, observation: str) -> str:
        return observation if self.dropped is None else re.sub(self.dropped, "", observation)


@dataclass(frozen=True)
class ConversationTemplate:
    """Template for an episode as one conversation.

    The system message contains the role, the task and the form of responses. The user's message of each turn contains the
    observation and the admissible actions.

    Attributes:
        tagged: the environment's template for single-turn prompts, which supplies the role and writes observations and actions.
    """

    tagged: TaggedTemplate

    style: ClassVar[PromptStyle] = "conversation"
    form: ClassVar[str] = (
        "In every turn the environment shows the result of your last action and, where it can, the actions that you can "
        "take. Begin every response with your reasoning about the situation and the goal, enclosed in <think> and "
        "</think>. Then give exactly one action, enclosed in <action> and </action>."
    )

    def system(self, task: str) -> str:
        """Write the system message."""
        described = [f"Your task: {task}"] if task else []
        return "\n\n".join([self.tagged.role, *described, self.form])

    def render(self, context: PromptContext) -> str:
        """Write the user's message: observation and actions."""
        return "\n\n".join(self.tagged.now(context))

    def project(self, response: str) -> Projection:
        """Return the text between the action tags of a response, as :class:`TaggedTemplate` does."""
        return self.tagged.project(response)


@dataclass(frozen=True)
class ToolTemplate(ConversationTemplate):
    """Template for an episode as one conversation with tool calls; its messages have the same parts as those of the base class.

    The chat template adds the tools; with ``tool_format="hermes"``, the system message contains them as text. The tool calls of
    a response are parsed with the tokenizer's ``response_template`` or in the Hermes format; ``project`` is not called.

    Attributes:
        one_call: whether the environment carries out only one call per response.
    """

    one_call: bool = False

    style: ClassVar[PromptStyle] = "tools"
    form: ClassVar[str] = (
        "The result of a call shows what your action led to and, where it can, the actions that you can take next."
    )

    def system(self, task: str) -> str:
        """Write the system message."""
        amount = "exactly one tool" if self.one_call else "one or more tools, which are carried out in order,"
        return f"{super().system(task)} Call {amount} in every turn."

    @property
    def hidden_actions(self) -> frozenset[str]:
        """Admissible actions that prompts do not list."""
        return self.tagged.hidden_actions

    def render(self, context: PromptContext) -> str:
        """Write the user's message: the last steps if the conversation restarts with them, then observation and actions."""
        past = [self.tagged.past(context)] if context.history else []
        return "\n\n".join([*past, *self.tagged.now(context)])


@dataclass(frozen=True)
class PlainTemplate:
    """Prompts with as few tokens as possible, for models of about a million parameters, which respond with the action only.

    Words of observations are lower-cased and lose their punctuation. Therefore "sidetable 1." and the "sidetable 1" of an
    action are the same tokens and can be copied. Actions are not changed.

    Attributes:
        dropped_lines: regular expression of observation lines without new information (banners, the repeated task).
        hidden_actions: admissible actions that prompts do not list.
    """

    dropped_lines: str | None = None
    hidden_actions: frozenset[str] = frozenset()

    style: ClassVar[PromptStyle] = "plain"

    def render(self, context: PromptContext) -> str:
        """Write the message: task, past observations and actions, current observation and admissible actions, one per line."""
        lines = [_bare_words(context.task)]
        for observation, action in context.history:
            lines += [self._compact(observation), f"> {action}"]
        lines.append(self._compact(context.observation))
        if context.admissible_actions:
            lines.append("actions")
            lines += [action for action in context.admissible_actions if action not in self.hidden_actions]
        return "\n".join(line for line in lines if line)

    def project(self, response: str) -> Projection:
        """Return the whole response as the action."""
        return project_action(response, "plain")

    def _compact(self, observation: str) -> str:
        if self.dropped_lines is not None:
            observation = re.sub(self.dropped_lines, "", observation, flags=re.MULTILINE | re.IGNORECASE)
        return _bare_words(observation)


def _bare_words(text: str) -> str:
    words = [word.strip(".,:;!?\"'()") for word in text.lower().split()]
    return " ".join(filter(None, words))


_GENERIC_TAGGED = TaggedTemplate(
    "You are an agent who pursues a goal by acting in a text environment, one step at a time.", keep_case=True
)
GENERIC: dict[PromptStyle, PromptTemplate] = {
    "tagged": _GENERIC_TAGGED,
    "plain": PlainTemplate(),
    "conversation": ConversationTemplate(_GENERIC_TAGGED),
    "tools": ToolTemplate(_GENERIC_TAGGED),
}
"""Templates by style, for environments without a template."""
CONVERSATIONS: dict[str, type[ConversationTemplate]] = {"conversation": ConversationTemplate, "tools": ToolTemplate}
"""Classes of the templates for conversations, by style; an instance is created from a :class:`TaggedTemplate`."""

_PROBES = (
    PromptContext("find the key", "You are in a hall.", ("go north", "help"), (), 1),
    PromptContext("find the key", "You see a key.", ("take key",), (("You are in a hall.", "go north"),), 2),
)


def check_template(template: Any, style: str, environment: str) -> None:
    """Reject an object that is not a template of the given style, or that omits the task from its messages.

    Raises:
        ConfigError: the template is invalid; the error names its value and the expected value.
    """
    methods = ("render", "project", "system") if style in CONVERSATIONS else ("render", "project")
    missing = [name for name in methods if not callable(getattr(template, name, None))]
    if isinstance(template, type) or missing or getattr(template, "style", None) not in GENERIC:
        raise ConfigError(
            f"A prompt template is {template!r:.200}, expected an object with a style (one of {', '.join(GENERIC)}), a "
            "render(context) that returns the message, and a project(response) that returns a Projection; in the styles tools "
            "and conversation also a system(task) that returns the system message."
        )
    if template.style != style:
        raise ConfigError(
            f"The templates of {environment} have a template for {template.style!r} responses under {style!r}; use the same style "
            "in both."
        )
    for probe in _PROBES:
        require_task(template, probe, environment)


def require_task(template: PromptTemplate, context: PromptContext, environment: str) -> None:
    """Reject a template whose prompts may lack the task; the search for the task ignores letter case, spaces and punctuation.

    The task must be in the user's message or, in a conversation, in the system message, the only message that is never dropped.

    Raises:
        ConfigError: a message may lack the task; the error contains the task and the message.
    """
    written = _messages(template, context)[0]
    if not isinstance(written, str) or _letters(context.task) not in _letters(written):
        remedy = (
            "the task into the system message" if template.style in CONVERSATIONS else "context.task into every message"
        )
        raise ConfigError(
            f"The prompt template {type(template).__qualname__} of {environment} drops the task: for the task {context.task!r} "
            f"at step {context.step} it writes {written!r:.300}. Put {remedy}."
        )


def _messages(template: PromptTemplate, context: PromptContext) -> list[str]:
    """Return the messages for one turn: in a conversation, the system message and the user's message, else only the latter."""
    user = template.render(context)
    return (
        [cast(ConversationPrompt, template).system(context.task), user] if template.style in CONVERSATIONS else [user]
    )


def _letters(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def describe_template(template: PromptTemplate) -> str:
    """Return the name of a template's class, and a digest of the messages that the template writes for fixed examples.

    The digest is the same in every process.
    """
    written = "\0".join(message for probe in _PROBES for message in _messages(template, probe))
    return f"{type(template).__qualname__} {hashlib.sha256(written.encode()).hexdigest()[:12]}"
