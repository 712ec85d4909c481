"""Prompt templates: how the user's message is written for an environment, and which form of response it asks for.

A template is an object with a ``style`` (the form of response), a ``render`` that writes the message, and a ``project``
that reads the action from the response; the two below are frozen dataclasses. An environment's adapter holds its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from trial_envs.core.projection import Projection, ResponseStyle, project_action
from trial_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What one prompt is made of.

    Attributes:
        task: instruction, one sentence.
        observation: what the environment shows now.
        admissible_actions: actions on offer, in the environment's order.
        history: the last (observation, action) pairs, oldest first.
        step: number of this decision, from 1.
    """

    task: str
    observation: str
    admissible_actions: Sequence[str]
    history: Sequence[tuple[str, str]]
    step: int


class PromptTemplate(Protocol):
    """Strategy that writes the user's message and reads the response."""

    @property
    def style(self) -> ResponseStyle:
        """Form of response that the message asks for."""
        ...

    def render(self, context: PromptContext) -> str:
        """Write the message."""
        ...

    def project(self, response: str) -> Projection:
        """Read the action from a response (special tokens removed)."""
        ...


@dataclass(frozen=True, slots=True)
class TaggedTemplate:
    """Full sentences for instruct models, who reason inside ``<think>`` and act inside ``<action>``.

    The first message shows the observation and the actions; later ones open with the task, the step count and the last
    records, because every turn is a conversation of its own.

    Attributes:
        role: opening sentence.
        hidden_actions: admissible actions that are not offered.
        dropped: pattern of what observations only repeat, such as the task on every page.
        tail: characters at the end of a response without action tags that count as its action.
    """

    role: str
    hidden_actions: frozenset[str] = frozenset()
    dropped: str | None = None
    tail: int = 30

    style: ClassVar[ResponseStyle] = "tagged"

    def render(self, context: PromptContext) -> str:
        """Write the message in full sentences."""
        parts, observation = [self.role], self._shown(context.observation)
        # The first observation usually states the task; a cut one may not any more.
        if context.task and (context.step > 1 or context.task not in observation):
            parts.append(f"Your task: {context.task}")
        if context.step > 1:
            parts.append(self._past(context))
        parts.append(f"This is step {context.step}. The environment shows:\n{observation}")
        offered = "\n".join(action for action in context.admissible_actions if action not in self.hidden_actions)
        if offered:
            parts.append(f"Actions that you can take now:\n{offered}")
        given = "exactly one of the actions listed above" if offered else "your action"
        parts.append(
            "Decide what to do next. Begin with your reasoning about the situation and the goal, enclosed in <think> "
            f"and </think>. Then give {given}, enclosed in <action> and </action>."
        )
        return "\n\n".join(parts)

    def project(self, response: str) -> Projection:
        """The text between the action tags; see :func:`trial_envs.core.projection.project_action`."""
        return project_action(response, "tagged", self.tail)

    def _past(self, context: PromptContext) -> str:
        taken = context.step - 1
        lines = [f"Steps taken so far: {taken}."]
        if context.history:
            lines.append("The most recent ones, oldest first:")
        for number, (observation, action) in enumerate(context.history, context.step - len(context.history)):
            shown = self._shown(observation)
            lines.append(f"[step {number}] The environment showed: {shown}\n[step {number}] You did: {action}")
        return "\n".join(lines)

    def _shown(self, observation: str) -> str:
        return observation if self.dropped is None else re.sub(self.dropped, "", observation)


@dataclass(frozen=True, slots=True)
class PlainTemplate:
    """As few tokens as possible for models of about a million parameters, which answer with the action alone.

    Words of observations are lower-cased and lose their punctuation, so that "sidetable 1." and the "sidetable 1" of
    an action are the same tokens and can be copied. Actions stay as they are.

    Attributes:
        dropped_lines: pattern of observation lines that say nothing new (banners, the task repeated).
        hidden_actions: admissible actions that are not offered.
    """

    dropped_lines: str | None = None
    hidden_actions: frozenset[str] = frozenset()

    style: ClassVar[ResponseStyle] = "plain"

    def render(self, context: PromptContext) -> str:
        """Write the message: task, past pairs, observation, actions; one a line."""
        lines = [_bare_words(context.task)]
        for observation, action in context.history:
            lines += [self._compact(observation), f"> {action}"]
        lines.append(self._compact(context.observation))
        if context.admissible_actions:
            lines.append("actions")
            lines += [action for action in context.admissible_actions if action not in self.hidden_actions]
        return "\n".join(line for line in lines if line)

    def project(self, response: str) -> Projection:
        """The whole response."""
        return project_action(response, "plain")

    def _compact(self, observation: str) -> str:
        if self.dropped_lines is not None:
            observation = re.sub(self.dropped_lines, "", observation, flags=re.MULTILINE | re.IGNORECASE)
        return _bare_words(observation)


def _bare_words(text: str) -> str:
    words = (word.strip(".,:;!?\"'()") for word in text.lower().split())
    return " ".join(word for word in words if word)


GENERIC: dict[ResponseStyle, PromptTemplate] = {
    "tagged": TaggedTemplate(
        "You are an agent who pursues a goal by acting in a text environment, one step at a time."
    ),
    "plain": PlainTemplate(),
}
"""Templates of environments that have none of their own, by the form of response."""

_PROBES = (
    PromptContext("find the key", "You are in a hall.", ("go north", "help"), (), 1),
    PromptContext("find the key", "You see a key.", ("take key",), (("You are in a hall.", "go north"),), 2),
)


def check_template(template: Any, style: str, environment: str) -> None:
    """Refuse what is no template of a style, or leaves the task out of its messages.

    Raises:
        ConfigError: says what was found and what is expected.
    """
    methods = [name for name in ("render", "project") if not callable(getattr(template, name, None))]
    if isinstance(template, type) or methods or getattr(template, "style", None) not in GENERIC:
        raise ConfigError(
            f"A prompt template is {template!r:.200}, expected an object with a style (one of {', '.join(GENERIC)}), a "
            "render(context) that returns the message, and a project(response) that returns a Projection."
        )
    if template.style != style:
        raise ConfigError(
            f"The templates of {environment} have one for {template.style!r} responses under {style!r}; set both alike."
        )
    for probe in _PROBES:
        require_task(template, probe, environment)


def require_task(template: PromptTemplate, context: PromptContext, environment: str) -> None:
    """Refuse a template whose message lacks the task; blanks, marks and case do not count.

    Raises:
        ConfigError: shows the task and the message.
    """
    written = template.render(context)
    if not isinstance(written, str) or _letters(context.task) not in _letters(written):
        raise ConfigError(
            f"The prompt template {type(template).__qualname__} of {environment} drops the task: for the task {context.task!r} "
            f"at step {context.step} it writes {written!r:.300}. Put context.task into every message."
        )


def _letters(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def describe_template(template: PromptTemplate) -> str:
    """Name of a template's class and digest of what it writes: the same in every process, another for other words."""
    written = "\0".join(template.render(probe) for probe in _PROBES)
    return f"{type(template).__qualname__} {hashlib.sha256(written.encode()).hexdigest()[:12]}"
