"""Environment adapter: what the trainer knows of an environment, and who demonstrates in it."""

from __future__ import annotations

import dataclasses
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Protocol, runtime_checkable

from trial_envs.tool_env import ToolEnv, ToolEpisode
from trial_ray.environments.templates import (
    CONVERSATIONS,
    GENERIC,
    PromptTemplate,
    TaggedTemplate,
    check_template,
    describe_template,
)
from trial_ray.errors import ConfigError


class Demonstrator(Protocol):
    """A player that sees no more than the policy."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Choose an action; one of the admissible ones where the environment lists them."""

    def carried_out(self, action: str) -> None:
        """Learn that ``action`` was carried out, which may be another one than it chose."""


@runtime_checkable
class Planner(Demonstrator, Protocol):
    """A demonstrator that can say between which actions it draws."""

    def options(self, observation: str, admissible: Sequence[str]) -> Sequence[str]:
        """The actions between which ``act`` draws, called next or in its place; at least one."""


@runtime_checkable
class SolutionReader(Demonstrator, Protocol):
    """A demonstrator that reads the environment's solution, for tasks that say all that their solution depends on."""

    def show(self, solution: Sequence[str]) -> None:
        """Learn the ``walkthrough`` of the episode that ``reset`` started; empty where the environment knows none."""


def begin(
    demonstrator: Demonstrator, task: str, observation: str, seed: int, solution: Callable[[], Sequence[str]]
) -> None:
    """Start an episode of a demonstrator; ``solution`` is read where the demonstrator reads it."""
    demonstrator.reset(task, observation, seed)
    if isinstance(demonstrator, SolutionReader):
        demonstrator.show(solution())


def plan(demonstrator: Demonstrator, observation: str, admissible: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The demonstrator's action, and all actions that it chooses between."""
    as_good = demonstrator.options(observation, admissible) if isinstance(demonstrator, Planner) else ()
    action = demonstrator.act(observation, admissible)
    return action, as_good or (action,)


class RandomPlay:
    """Draws one of the actions on offer: it shows the form of actions, not which of them help."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""
        self._random = random.Random(seed)

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Draw an action.

        Raises:
            ConfigError: the environment lists no actions.
        """
        if not admissible:
            raise ConfigError(
                "The environment lists no admissible_actions to draw from; give its adapter a demonstrator to clone."
            )
        return self._random.choice(list(admissible))

    def carried_out(self, action: str) -> None:
        """Nothing is remembered."""


ACQUISITION, PLACEMENT, NAVIGATION = "acquisition", "placement", "navigation"
COMPLETION, OTHER = "completion", "inspection/other"
ACTION_CLASSES = (ACQUISITION, PLACEMENT, NAVIGATION, COMPLETION, OTHER)
"""Kinds of decisions, the rows of an allocation trace."""
MOST_SEEDS = 1_000_000
"""Most tasks in a split whose tasks are seeds, so that no two splits share any."""


@dataclass(frozen=True)
class WarmStartSpec:
    """An environment's expert, tasks and vocabulary for the warm start.

    Attributes:
        demonstrator: makes the player whose actions are cloned; ``None``: actions on offer are drawn at random.
        generated: from a seed and a number of tasks the keyword arguments that generate them; ``None``: tasks of the split
            ``train`` are played.
        vocabulary: words that the tiny model's tokenizer holds as one token each, in this order, beside frequent ones.
        interchangeable: groups of names that may be exchanged in the examples.
    """

    demonstrator: Callable[[], Demonstrator] | None = None
    generated: Callable[[int, int], Mapping[str, Any]] | None = None
    vocabulary: Sequence[str] = ()
    interchangeable: Sequence[Sequence[str]] = ()


def generated_games(seed: int, number: int) -> dict[str, Any]:
    """Keyword arguments of the split ``generated`` of this package's environments."""
    return {"split": "generated", "num_games": number, "generator_seed": seed}


@dataclass(frozen=True)
class ReportLabels:
    """Names of an environment's families, splits and action classes in reports.

    Attributes:
        action_patterns: pairs of a regular expression and one of :data:`ACTION_CLASSES`; the first that matches the
            beginning of an action (lower case) says its class, ``inspection/other`` where none does. Without any, reports
            show no classes.
        family_titles: headings of the families in result tables, in the order of the columns; without any, a table has
            columns for success and score instead.
        split_titles: headings of the splits in result tables.
    """

    action_patterns: Sequence[Sequence[str]] = ()
    family_titles: Mapping[str, str] = field(default_factory=dict)
    split_titles: Mapping[str, str] = field(default_factory=dict)


def _is_pattern(pair: Any) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or pair[1] not in ACTION_CLASSES:
        return False
    try:
        re.compile(pair[0])
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return isinstance(pair[0], str)


@dataclass(frozen=True)
class EnvironmentAdapter:
    """Description of an environment for the trainer; every field but the id has a default that fits any text environment.

    Attributes:
        env_id: id under which the environment is registered with Gymnasium.
        title: name in tables; empty: the id without namespace and version.
        task: the instruction, where ``info`` has no ``"task"``.
        templates: prompt templates by style (``"tagged"``, ``"plain"``, ``"conversation"``, ``"tools"``), see
            :mod:`trial_ray.environments.templates`. Conversations that are missing follow from a ``TaggedTemplate``; any other
            style that is missing is written by a generic template.
        skills: advice for the ``"skill"`` view by family (``info["family"]``), and under ``""`` for all other families;
            ``None``: the environment offers no such view.
        success: when an episode counts as won: a return that it must reach, up to rounding, or a function of ``info`` and the
            return so far; ``None``: as ``info["won"]`` says.
        score: score in [0, 1] as a function of ``info`` and the return so far; ``None``: ``info["score"]``, and where
            that is missing the return, cut to [0, 1].
        max_turns: turns after which an episode ends, if the environment does not end it before; ``None``: the environment's
            own limit (its ``max_turns``, or the ``max_episode_steps`` that it is registered with), and 50 where none is known.
        own_process: whether every instance gets a process of its own, so that one that hangs or crashes costs its rollout alone;
            for environments that may block: simulators, browsers, network services. The setting ``environment_processes``
            decides before.
        num_seeds: tasks in a split of an environment without ``tasks(split)``, whose tasks are the seeds of ``reset``.
        warm_start: what a warm start clones.
        labels: what reports call families, splits and actions.
        defaults: settings of the config that :meth:`~trial_ray.algorithms.GRPOConfig.environment` sets where they still have
            the config's own default, such as ``max_prompt_tokens``.
        tools: of the style ``"tools"``: a class whose public methods are the tools, of which no instance is made. A tool returns
            ``self._take(action)``; its name, type hints and docstring are the schema. The default has the one tool ``act(action)``.
    """

    env_id: str
    title: str = ""
    task: str = ""
    templates: Mapping[str, PromptTemplate] = field(default_factory=dict)
    skills: Mapping[str, str] | None = None
    success: float | Callable[[Mapping[str, Any], float], bool] | None = None
    score: Callable[[Mapping[str, Any], float], float] | None = None
    max_turns: int | None = None
    own_process: bool = False
    num_seeds: int = 4096
    warm_start: WarmStartSpec = WarmStartSpec()
    labels: ReportLabels = ReportLabels()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tools: type[ToolEpisode] = ToolEnv

    @property
    def name(self) -> str:
        """The title, or the id without namespace and version."""
        return self.title or self.env_id.rpartition("/")[2].partition("-v")[0]

    def template(self, style: str) -> PromptTemplate:
        """The template of a style, the environment's own or the generic one.

        Raises:
            ConfigError: unknown style.
        """
        if style not in GENERIC:
            raise ConfigError(f"prompt_style is {style!r}, expected one of {', '.join(map(repr, GENERIC))}.")
        own = self.own_template(style)
        return GENERIC[style] if own is None else own

    def own_template(self, style: str) -> PromptTemplate | None:
        """The environment's own template of a style; ``None`` if it has none and none follows from another one."""
        tagged = self.templates.get("tagged")
        if style in CONVERSATIONS and style not in self.templates and isinstance(tagged, TaggedTemplate):
            return CONVERSATIONS[style](tagged)
        return self.templates.get(style)

    def action_class(self, action: str) -> str:
        """Class of an action that did not end its episode, one of :data:`ACTION_CLASSES`."""
        text = action.strip().lower()
        return next((name for pattern, name in self.labels.action_patterns if re.match(pattern, text)), OTHER)

    def turn_classes(self, actions: Sequence[str], terminated: bool) -> list[str]:
        """Class of every turn of a trajectory; the one with which the environment ended it is its completion.

        Empty strings where the labels have no patterns: such an environment's actions have no classes.
        """
        if not self.labels.action_patterns:
            return [""] * len(actions)
        classes = [self.action_class(action) for action in actions]
        if classes and terminated:
            classes[-1] = COMPLETION
        return classes

    def check(self) -> None:
        """Reject what cannot be used.

        Raises:
            ConfigError: names the field, what was found, and what is expected.
        """
        if not isinstance(self.env_id, str) or not self.env_id:
            raise self._error("env_id", "the id under which the environment is registered")
        for style, template in self._mapping("templates").items():
            check_template(template, style, self.env_id)
        if not (isinstance(self.tools, type) and issubclass(self.tools, ToolEpisode)):
            raise self._error("tools", "a subclass of trial_envs.tool_env.ToolEpisode")
        if self.skills is not None:
            self._check_skills()
        success = self.success
        if success is not None and not callable(success) and not (_is_number(success) and math.isfinite(success)):
            raise self._error("success", "a finite return to reach, or a function of info and the return so far")
        if self.score is not None and not callable(self.score):
            raise self._error("score", "a function, or None")
        if self.max_turns is not None and not (_is_number(self.max_turns, int) and self.max_turns >= 1):
            raise self._error("max_turns", "at least 1, or None")
        if not isinstance(self.own_process, bool):
            raise self._error("own_process", "True or False")
        if not (_is_number(self.num_seeds, int) and 1 <= self.num_seeds <= MOST_SEEDS):
            raise self._error("num_seeds", f"1 to {MOST_SEEDS:,}")
        if not isinstance(self.warm_start, WarmStartSpec):
            raise self._error("warm_start", "a WarmStartSpec")
        for name in ("generated", "demonstrator"):
            if not (getattr(self.warm_start, name) is None or callable(getattr(self.warm_start, name))):
                raise self._error(f"warm_start.{name}", "a function, or None")
        self.check_labels()
        self._check_pickles()

    def check_labels(self) -> None:
        """Reject labels that cannot be used.

        Raises:
            ConfigError: names the field, what was found, and what is expected.
        """
        if not isinstance(self.labels, ReportLabels):
            raise self._error("labels", "ReportLabels")
        for name in ("family_titles", "split_titles"):
            titles = getattr(self.labels, name)
            if not isinstance(titles, Mapping) or not all(
                isinstance(each, str) for each in [*titles, *titles.values()]
            ):
                raise self._error(f"labels.{name}", "a dict from names to headings")
        patterns = self.labels.action_patterns
        if not isinstance(patterns, list | tuple) or not all(map(_is_pattern, patterns)):
            classes = ", ".join(ACTION_CLASSES)
            raise self._error("labels.action_patterns", f"pairs of a regular expression and a class out of {classes}")

    def describe(self) -> dict[str, Any]:
        """Fields that decide prompts and rewards, as plain values: the same in every process."""
        return {
            "env_id": self.env_id,
            "task": self.task,
            "templates": {style: describe_template(template) for style, template in sorted(self.templates.items())},
            **({} if self.tools is ToolEnv else {"tools": _described(self.tools)}),
            "skills": None if self.skills is None else dict(self.skills),
            "success": _described(self.success),
            "score": _described(self.score),
            "max_turns": self.max_turns,
        }

    def describe_labels(self) -> dict[str, Any]:
        """Title and labels for reports, as plain values."""
        return {
            "title": self.name,
            "family_titles": dict(self.labels.family_titles),
            "split_titles": dict(self.labels.split_titles),
            "action_patterns": [list(pattern) for pattern in self.labels.action_patterns],
        }

    @classmethod
    def from_labels(cls, env_id: str, labels: Mapping[str, Any]) -> EnvironmentAdapter:
        """An adapter that knows what :meth:`describe_labels` gave, for reports.

        Raises:
            ConfigError: the labels cannot be used.
            TypeError: they are no such labels.
        """
        named = dict(labels)
        adapter = cls(env_id, title=named.pop("title"), labels=ReportLabels(**named))
        adapter.check_labels()
        return adapter

    def _check_skills(self) -> None:
        for family, text in self._mapping("skills").items():
            if not isinstance(family, str) or not isinstance(text, str) or not text.strip():
                raise ConfigError(
                    f"The adapter of {self.env_id} has skills[{family!r}] = {text!r:.200}, expected a family (str) and its "
                    "advice (a text)."
                )
        if "" not in (self.skills or {}):
            raise ConfigError(
                f'The adapter of {self.env_id} needs general advice in skills under the key "", for families without '
                "their own."
            )

    def _mapping(self, name: str) -> Mapping[Any, Any]:
        value = getattr(self, name)
        if not isinstance(value, Mapping):
            raise self._error(name, "a dict")
        return value

    def _check_pickles(self) -> None:
        from ray import cloudpickle

        for part in dataclasses.fields(self):
            try:
                cloudpickle.loads(cloudpickle.dumps(getattr(self, part.name)))
            except Exception as error:  # whatever a user's object raises when it is pickled
                raise ConfigError(
                    f"The adapter of {self.env_id} cannot be sent to actors: {part.name} cannot be pickled "
                    f"({type(error).__name__}: {error}). Leave open files, locks and processes out of it."
                ) from error

    def _error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            f"The adapter of {self.env_id} has {name} = {operator.attrgetter(name)(self)!r:.200}, expected {expected}."
        )


def _is_number(value: Any, kind: type | UnionType = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _described(value: Any) -> Any:
    if not callable(value):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)  # a partial function has no name of its own
    return f"{named.__module__}.{named.__qualname__}"
