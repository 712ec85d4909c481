"""Environment adapters, which describe environments for the trainer, and the interfaces (``Protocol``) of experts."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Protocol, runtime_checkable

from trial_envs.tool_env import ToolEnv, ToolEpisode
from trial_ray.adapters.templates import (
    CONVERSATIONS,
    GENERIC,
    PromptTemplate,
    TaggedTemplate,
    check_template,
    describe_template,
)
from trial_ray.errors import ConfigError
from trial_ray.files import Json, text_digest


class Demonstrator(Protocol):
    """Scripted expert that sees the same information as the policy."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Choose an action, from ``admissible`` if the environment lists admissible actions."""

    def carried_out(self, action: str) -> None:
        """Receive the action that was carried out, which may differ from the chosen action."""


@runtime_checkable
class Planner(Demonstrator, Protocol):
    """Expert that can list the actions from which it draws."""

    def options(self, observation: str, admissible: Sequence[str]) -> Sequence[str]:
        """List the actions from which ``act`` draws, at least one; :func:`plan` calls this method before ``act``."""


@runtime_checkable
class SolutionReader(Demonstrator, Protocol):
    """Expert that receives the environment's solution. Use it only if the text of a task determines the solution."""

    def show(self, solution: Sequence[str]) -> None:
        """Receive the environment's solution of the episode that ``reset`` started; empty if the environment has none."""


@runtime_checkable
class Speaker(Demonstrator, Protocol):
    """Expert that also writes whole responses, with reasoning."""

    def response(self, action: str) -> str:
        """Write a response with this action, which ``act`` could have chosen, in the format that the prompt style requests."""


def begin(
    demonstrator: Demonstrator, task: str, observation: str, seed: int, solution: Callable[[], Sequence[str]]
) -> None:
    """Start an expert's episode.

    ``solution`` returns the environment's solution, and is only called if the expert is a :class:`SolutionReader`.
    """
    demonstrator.reset(task, observation, seed)
    if isinstance(demonstrator, SolutionReader):
        demonstrator.show(solution())


def plan(demonstrator: Demonstrator, observation: str, admissible: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the expert's action, and all actions from which it chooses."""
    options = demonstrator.options(observation, admissible) if isinstance(demonstrator, Planner) else ()
    action = demonstrator.act(observation, admissible)
    return action, options or (action,)


class RandomAgent:
    """Expert that draws an admissible action at random: it shows the form of actions, but not which actions help."""

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
                "The environment lists no admissible_actions to draw from; set the demonstrator of its adapter."
            )
        return self._random.choice(list(admissible))

    def carried_out(self, action: str) -> None:
        """Do nothing: the next action does not depend on the last one."""


ACQUISITION, PLACEMENT, NAVIGATION = "acquisition", "placement", "navigation"
COMPLETION, OTHER = "completion", "inspection/other"
ACTION_CLASSES = (ACQUISITION, PLACEMENT, NAVIGATION, COMPLETION, OTHER)
"""Classes of actions. Reports show the mean weight that TRIAL's loss gives to the turns of each class."""
MAX_SEEDS = 1_000_000
"""Maximum number of tasks in a split whose tasks are seeds; each split has its own range of seeds of this size."""


@dataclass(frozen=True)
class WarmStartSpec:
    """An environment's expert, tasks and vocabulary for the warm start, which clones the expert.

    Attributes:
        demonstrator: creates the expert to clone; if it is ``None``, admissible actions are drawn at random.
        generated: function of a seed and a number of tasks that returns the environment's keyword arguments for generating the
            tasks; if it is ``None``, tasks of the split ``train`` are played.
        vocabulary: words that are single tokens, with ids in this order, if the warm start trains a tiny model from scratch; if
            it is empty, frequent words of the environment's texts are used.
        interchangeable: groups of names; names of a group may be swapped in training examples.
    """

    demonstrator: Callable[[], Demonstrator] | None = None
    generated: Callable[[int, int], Mapping[str, Any]] | None = None
    vocabulary: Sequence[str] = ()
    interchangeable: Sequence[Sequence[str]] = ()


def generated_games(seed: int, number: int) -> Json:
    """Return the keyword arguments with which this package's environments generate ``number`` tasks from a seed."""
    return {"split": "generated", "num_games": number, "generator_seed": seed}


@dataclass(frozen=True)
class ReportLabels:
    """Names of an environment's families, splits and action classes in reports.

    Attributes:
        action_patterns: pairs of a regular expression and a class from :data:`ACTION_CLASSES`. The first expression that
            matches the start of an action (lower case) determines its class; ``inspection/other`` if none matches. Without
            patterns, reports show no classes.
        family_titles: headings of the families in result tables, in the order of the columns; if empty, a table has columns for
            success and score instead.
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
    """Description of an environment for the trainer; every field except ``env_id`` has a default that fits any text environment.

    Attributes:
        env_id: id of the environment in Gymnasium's registry.
        title: name in tables; if it is empty, the id without namespace and version.
        task: the instruction, used if ``info`` has no ``"task"``.
        templates: prompt templates by style (``"tagged"``, ``"plain"``, ``"conversation"``, ``"tools"``), see
            :mod:`trial_ray.adapters.templates`. A missing ``"conversation"`` or ``"tools"`` template is derived from
            the ``"tagged"`` template if that is a ``TaggedTemplate``; any other missing template is generic.
        skills: advice for the ``"skill"`` teacher context by family (``info["family"]``), and under ``""`` for all other
            families; ``None`` if the environment does not support this teacher context.
        success: criterion for a won episode: a return to reach, up to rounding, or a function of ``info`` and the return so
            far; if it is ``None``, ``info["won"]`` decides.
        score: score in [0, 1] as a function of ``info`` and the return so far. If it is ``None``, ``info["score"]`` is used
            or, without this key, the return clipped to [0, 1].
        max_turns: maximum number of turns of an episode, if the environment does not end it earlier. If it is ``None``, the
            limit is the environment's own (its keyword argument ``max_turns``, or the ``max_episode_steps`` of its
            registration), or 50 without any limit.
        own_process: whether every instance runs in a separate process, so a hang or crash costs only its rollout. Use it
            for environments that may block: simulators, browsers, network services. The setting ``environment_processes`` takes
            precedence.
        num_seeds: number of tasks in a split of an environment without ``tasks(split)``; its tasks are the seeds of ``reset``.
        warm_start: expert, tasks and vocabulary for the warm start (behaviour cloning).
        labels: names of families, splits and actions in reports.
        defaults: values of settings, such as ``max_prompt_tokens``, that replace the config's defaults when
            :meth:`~trial_ray.algorithms.GRPOConfig.environment` selects the environment.
        tools: for the style ``"tools"``: a class with the tools as its public methods; its constructor is not called. A tool
            returns ``self._take(action)``; its name, type hints and docstring are the schema. The default has the single tool
            ``act(action)``.
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
        """The environment's title; without a title, its id without namespace and version."""
        return self.title or self.env_id.rpartition("/")[2].partition("-v")[0]

    def template(self, style: str) -> PromptTemplate:
        """Return the template of a style: the environment's own template, else the generic template.

        Raises:
            ConfigError: the style is unknown.
        """
        if style not in GENERIC:
            raise ConfigError(f"prompt_style is {style!r}, expected one of {', '.join(map(repr, GENERIC))}.")
        own = self.own_template(style)
        return GENERIC[style] if own is None else own

    def own_template(self, style: str) -> PromptTemplate | None:
        """Return the environment's own template of a style, which may be derived from its tagged template, or ``None``."""
        tagged = self.templates.get("tagged")
        if style in CONVERSATIONS and style not in self.templates and isinstance(tagged, TaggedTemplate):
            return CONVERSATIONS[style](tagged)
        return self.templates.get(style)

    def action_class(self, action: str) -> str:
        """Return the class of an action that did not end its episode, from :data:`ACTION_CLASSES`."""
        text = action.strip().lower()
        return next((name for pattern, name in self.labels.action_patterns if re.match(pattern, text)), OTHER)

    def turn_classes(self, actions: Sequence[str], terminated: bool) -> list[str]:
        """Return the class of every turn's action; if the environment terminated the episode, the last class is ``completion``.

        Without patterns in the labels, actions have no classes: all strings are empty.
        """
        if not self.labels.action_patterns:
            return [""] * len(actions)
        classes = [self.action_class(action) for action in actions]
        if classes and terminated:
            classes[-1] = COMPLETION
        return classes

    def check(self) -> None:
        """Reject an adapter that cannot be used.

        Raises:
            ConfigError: a field is invalid; the message names the field, its value and the expected values.
        """
        if not isinstance(self.env_id, str) or not self.env_id:
            raise self._error("env_id", "the id under which the environment is registered")
        for style, template in self._mapping("templates").items():
            check_template(template, style, self.env_id)
        if self.skills is not None:
            self._check_skills()
        success, max_turns = self.success, self.max_turns
        for name, is_valid, expected in (
            (
                "tools",
                isinstance(self.tools, type) and issubclass(self.tools, ToolEpisode),
                "a subclass of trial_envs.tool_env.ToolEpisode",
            ),
            (
                "success",
                success is None or callable(success) or (_is_number(success) and math.isfinite(success)),
                "a finite return to reach, or a function of info and the return so far",
            ),
            ("max_turns", max_turns is None or (_is_number(max_turns, int) and max_turns >= 1), "at least 1, or None"),
            ("own_process", isinstance(self.own_process, bool), "True or False"),
            (
                "num_seeds",
                _is_number(self.num_seeds, int) and 1 <= self.num_seeds <= MAX_SEEDS,
                f"1 to {MAX_SEEDS:,}",
            ),
            ("warm_start", isinstance(self.warm_start, WarmStartSpec), "a WarmStartSpec"),
        ):
            if not is_valid:
                raise self._error(name, expected)
        for name in ("score", "warm_start.generated", "warm_start.demonstrator"):
            if not ((function := operator.attrgetter(name)(self)) is None or callable(function)):
                raise self._error(name, "a function, or None")
        self.check_labels()
        self._check_pickles()

    def check_labels(self) -> None:
        """Reject labels that cannot be used.

        Raises:
            ConfigError: a field is invalid; the message names the field, its value and the expected values.
        """
        if not isinstance(self.labels, ReportLabels):
            raise self._error("labels", "ReportLabels")
        for name in ("family_titles", "split_titles"):
            titles = getattr(self.labels, name)
            if not isinstance(titles, Mapping) or not all(
                isinstance(text, str) for text in [*titles, *titles.values()]
            ):
                raise self._error(f"labels.{name}", "a dict from names to headings")
        patterns = self.labels.action_patterns
        if not isinstance(patterns, list | tuple) or not all(map(_is_pattern, patterns)):
            classes = ", ".join(ACTION_CLASSES)
            raise self._error("labels.action_patterns", f"pairs of a regular expression and a class out of {classes}")

    def describe(self) -> Json:
        """Return the fields that determine prompts and rewards, as plain values that are the same in every process."""
        return {
            "env_id": self.env_id,
            "task": self.task,
            "templates": {style: describe_template(template) for style, template in sorted(self.templates.items())},
            **({} if self.tools is ToolEnv else {"tools": f"{_described(self.tools)} {_digest(self.tools)}"}),
            "skills": None if self.skills is None else dict(self.skills),
            "success": _described(self.success),
            "score": _described(self.score),
            "max_turns": self.max_turns,
        }

    def describe_labels(self) -> Json:
        """Return the title and the labels for reports, as values that JSON can represent."""
        return {
            "title": self.name,
            "family_titles": dict(self.labels.family_titles),
            "split_titles": dict(self.labels.split_titles),
            "action_patterns": [list(pattern) for pattern in self.labels.action_patterns],
        }

    @classmethod
    def from_labels(cls, env_id: str, labels: Mapping[str, Any]) -> EnvironmentAdapter:
        """Create an adapter for reports from the result of :meth:`describe_labels`.

        Raises:
            ConfigError: the labels cannot be used.
            KeyError, TypeError: ``labels`` is not a result of :meth:`describe_labels`.
        """
        fields = dict(labels)
        adapter = cls(env_id, title=fields.pop("title"), labels=ReportLabels(**fields))
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
            except Exception as error:  # Pickling calls a user's code, which may raise any error.
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
    # Omit the module name: for a user's file it depends on whether `trial-ray train` runs or --env-adapter loads the file. A
    # partial function has no `__qualname__`, so its class is named.
    return (value if hasattr(value, "__qualname__") else type(value)).__qualname__


def _digest(tools: type) -> str:
    """Return a digest of the signatures and docstrings of a class's own tools, without the name of the class's module."""
    methods = inspect.getmembers(tools, inspect.isfunction)
    own = [(name, tool) for name, tool in methods if not hasattr(ToolEpisode, name)]
    text = str([(name, inspect.signature(tool), inspect.getdoc(tool)) for name, tool in own])
    return text_digest(text.replace(f"{tools.__module__}.", "")).hex()[:12]
