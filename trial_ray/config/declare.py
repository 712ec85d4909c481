"""Declarations of settings: each setting is written once, as a field of a class with its type, default, documentation and range.

A class of settings derives from :class:`Settings`, declares fields with :func:`setting`, and names the fluent method that sets
them with :class:`Section`. Range checks, ``--set`` and the tables of the documentation read these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from types import NoneType
from typing import Any, TypeVar

from trial_ray.errors import ConfigError

NAMES_ELSEWHERE = {
    "adv_estimator": "advantage_estimator",
    "beta": "ref_kl_coeff",
    "entropy_coef": "entropy_coeff",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "learning_rate": "lr",
    "loss_mode": "policy_loss",
    "loss_type": "surrogate_mean",
    "max_completion_length": "max_response_tokens",
    "max_grad_norm": "grad_clip",
    "max_prompt_length": "max_prompt_tokens",
    "max_response_length": "max_response_tokens",
    "num_generations": "group_size",
    "num_iterations": "num_epochs",
    "scale_rewards": "advantage_norm",
}
"""Names of this package's settings, by their names in TRL or verl (docs/methods.md)."""


PLAIN_TYPES = frozenset({bool, int, float, str, list, tuple, dict, NoneType})
"""Plain types, whose values can be given on a command line or in a JSON file."""

_ORIGINS = {typing.Literal: str, Mapping: dict, Sequence: list}
"""Plain types of the values that generic annotations such as ``Sequence[str]`` describe."""
_ACCEPTED: dict[type, Any] = {float: numbers.Real, int: numbers.Integral, tuple: tuple | list, dict: Mapping}
"""Types of the values that a setting of a plain type accepts; NumPy registers its scalars with ``numbers``."""
_TUNE_DOMAIN = ("ray.tune.search.sample", "Domain")
"""Module and name of the base class of Tune's search distributions."""
_METADATA = "trial_ray"

Config = TypeVar("Config")

_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "of at least {0}"),
    "above": (operator.gt, "above {0}"),
    "within": (lambda value, pair: pair[0] <= value <= pair[1], "in [{0[0]}, {0[1]}]"),
    "one_of": (lambda value, known: value in known, ""),
}
"""Comparison of a value with each kind of bound, and description of the bound in messages."""


@dataclass(frozen=True)
class Declaration:
    """Metadata of a setting, except for its default.

    Attributes:
        doc: meaning of the setting, with its unit.
        bounds: arguments of :func:`setting` that limit the value, such as ``at_least``, by name.
        infinite: whether infinity is allowed, meaning "no limit".
        section: name of the config's fluent method that sets the setting, such as ``training``.
    """

    doc: str = ""
    bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    infinite: bool = False
    section: str = ""

    def allows(self, value: Any) -> bool:
        """Return whether a value, or every number in a list or tuple, is in the setting's range; NaN is in no range."""
        if self.bounds and isinstance(value, tuple | list):
            return all(isinstance(number, numbers.Real) and self.allows(number) for number in value)
        within = all(_BOUNDS[name][0](value, bound) for name, bound in self.bounds.items())
        return within and (self.infinite or not _is_infinite(value))


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    within: tuple[float, float] | None = None,
    one_of: Iterable[Any] = (),
    infinite: bool = False,
) -> Any:
    """Declare a setting in the body of a class of settings: ``name: type = setting(default, "meaning")``.

    A subclass that declares the name again changes its default or type; it inherits documentation and bounds that it does not
    specify.

    Args:
        default: value if the setting is not set.
        doc: meaning of the setting, with its unit.
        factory: creates the default, if it is a dict or list.
        at_least: smallest value.
        above: number that the value must exceed.
        within: smallest and largest value.
        one_of: the allowed values, unless the type is a ``Literal`` of them.
        infinite: whether infinity is allowed, meaning "no limit".
    """
    bounds: dict[str, Any] = {"at_least": at_least, "above": above, "within": within, "one_of": tuple(one_of)}
    bounds = {name: bound for name, bound in bounds.items() if bound not in (None, ())}
    metadata = {_METADATA: Declaration(doc, bounds, infinite)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class RLlibSettings:
    """Settings of RLlib's config that this package reads. RLlib declares, sets and documents them."""

    create_local_env_runner: bool
    env: Any
    env_config: dict[str, Any]
    evaluation_interval: int | None
    grad_clip: float | None
    lr: float | list[list[float]]
    num_cpus_per_learner: float | str
    num_gpus_per_learner: float
    num_learners: int
    placement_strategy: str
    restart_failed_env_runners: bool
    sample_timeout_s: float
    seed: int | None


class Settings:
    """Base class of classes with settings as fields.

    A subclass becomes a dataclass without generated methods, because the constructor of the config class sets the fields with
    :func:`set_defaults`. The fields of a subclass belong to its own :class:`Section` or, if it defines none, to the inherited
    section that was created with ``of_subclasses=True``.

    Raises:
        ConfigError: a setting has no default, no section or no annotation, or an annotation cannot be resolved.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = {name: field for base in reversed(cls.__bases__) for name, field in fields_of(base).items()}
        for name in cls.__dict__.keys() & inherited.keys() - inspect.get_annotations(cls).keys():
            raise ConfigError(f"{cls.__name__}.{name} needs its type: write `{name}: TYPE = setting(DEFAULT)`.")
        dataclass(init=False, repr=False, eq=False, match_args=False)(cls)
        try:
            # Resolve annotations now: another process that unpickles the class may lack the module that defines their names.
            hints = inspect.get_annotations(cls, eval_str=True)
        except NameError as error:
            raise ConfigError(
                f"The type of a setting of {cls.__name__} is unknown when the class is created: {error}. Import it without "
                "TYPE_CHECKING."
            ) from error
        for name, field in fields_of(cls).items():
            if name not in hints:
                continue
            if default_of(field) is MISSING:
                raise ConfigError(f"{cls.__name__}.{name} has no default: write `{name}: TYPE = setting(DEFAULT)`.")
            field.type = hints[name]
            field.metadata = types.MappingProxyType({_METADATA: _completed(cls, field, inherited.get(name))})


def _completed(cls: type, field: Field[Any], inherited: Field[Any] | None) -> Declaration:
    """Return the declaration of ``field``, completed by the declaration of the inherited field."""
    declared = declaration(field)
    if inherited is not None:
        base = declaration(inherited)
        return dataclasses.replace(base, doc=declared.doc or base.doc, bounds={**base.bounds, **declared.bounds})
    for section in sections_of(cls):
        if section.owner is cls or section.of_subclasses:
            return dataclasses.replace(declared, section=section.name)
    raise ConfigError(f"{cls.__name__}.{field.name} is in no section that could set it.")


class Section:
    """A fluent method that sets the settings of its class: ``engines = Section("Choose the inference engines.")``.

    Its signature and documentation list all settings, including the settings of the subclass on which it is accessed. If RLlib
    has a method with this name, its keywords are accepted too.

    Args:
        doc: first sentence of the method's documentation.
        of_subclasses: whether the method also sets the settings that a subclass declares.
    """

    def __init__(self, doc: str, *, of_subclasses: bool = False) -> None:
        self.doc = doc
        self.of_subclasses = of_subclasses

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: Config | None, owner: type[Config]) -> Callable[..., Config]:
        return self._function(owner).__get__(instance, owner)

    def keywords(self, owner: type) -> dict[str, Field[Any]]:
        """Return the settings of the class ``owner`` that this section sets, by name."""
        return {name: field for name, field in fields_of(owner).items() if declaration(field).section == self.name}

    def _function(self, owner: type[Config]) -> Any:
        keywords = self.keywords(owner)
        further = [name for name in self.further(owner) if name not in keywords]

        def assign(config: Config, **settings: Any) -> Config:
            known = [*keywords, *further]
            for keyword in settings.keys() - known:
                raise self._unknown(type(config), keyword, known)
            rest = {name: value for name, value in settings.items() if name in further}
            if rest:
                getattr(super(self.owner, config), self.name)(**rest)
            for keyword in settings.keys() - rest.keys():
                setattr(config, keyword, settings[keyword])
            return config

        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=field.type)
            for name, field in keywords.items()
        ]
        if further:
            parameters.append(inspect.Parameter("further", inspect.Parameter.VAR_KEYWORD, annotation=Any))
        assign.__name__, assign.__qualname__ = self.name, f"{owner.__name__}.{self.name}"
        assign.__doc__ = self._documentation(keywords, further)
        assign.__signature__ = inspect.Signature(parameters, return_annotation=owner)  # type: ignore[attr-defined]
        return assign

    def further(self, owner: type) -> list[str]:
        """Return the keywords of RLlib's method with this section's name, except deprecated keywords, which have no annotation."""
        extended = getattr(super(self.owner, owner), self.name, None)
        parameters = inspect.signature(extended).parameters.values() if extended else ()
        return [
            parameter.name
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is not parameter.empty
        ]

    def _documentation(self, keywords: dict[str, Field[Any]], further: list[str]) -> str:
        texts = [f"{name}: {declaration(field).doc}." for name, field in keywords.items()]
        if further:
            texts.append(f"further: {', '.join(further)}; see RLlib.")
        wrapped = [textwrap.fill(text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in texts]
        return "\n".join([self.doc, "", "A setting that is not given keeps its value.", "", "Args:", *wrapped])

    def _unknown(self, owner: type, keyword: str, known: Iterable[str]) -> ConfigError:
        elsewhere = [other for other in sections_of(owner) if keyword in other.keywords(owner)]
        hint = f" It is set by .{elsewhere[0].name}({keyword}=...)." if elsewhere else did_you_mean(keyword, known)
        return ConfigError(f"{owner.__name__}.{self.name}() has no setting {keyword!r}.{hint}")


# -- reading the declarations of a class -------------------------------------------------------------------------------


def fields_of(cls: type) -> dict[str, Field[Any]]:
    """Return the settings of a class, by name."""
    return {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def sections_of(cls: type) -> list[Section]:
    """Return the fluent methods of a class that set settings, in the order of its bases."""
    return [value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, Section)]


def default_of(field: Field[Any]) -> Any:
    """Return the default of a setting; with a factory, a new object.

    The factory is not compared with ``MISSING``, because a class that was sent to another process has a copy of ``MISSING``.
    """
    factory = field.default_factory
    return factory() if callable(factory) else field.default


def set_defaults(config: Any) -> None:
    """Set every setting of the class of ``config`` to its default, as an attribute of ``config``."""
    for name, field in fields_of(type(config)).items():
        setattr(config, name, default_of(field))


def plain_types(cls: type, name: str) -> frozenset[type]:
    """Return the plain types of a setting's values; empty for other types and undeclared settings of RLlib."""
    field = fields_of(cls).get(name)
    return plain_types_of(typing.get_type_hints(RLlibSettings).get(name, Any) if field is None else field.type)


def accepts(cls: type, name: str, value: Any) -> bool:
    """Return whether a setting accepts a value; ``True`` for RLlib's own settings, since their types are not declared reliably."""
    field = fields_of(cls).get(name)
    return field is None or _fits(value, field)


def may_be_infinite(cls: type, name: str) -> bool:
    """Return whether a setting of the class accepts an infinite number."""
    field = fields_of(cls).get(name)
    return field is not None and declaration(field).infinite


def plain_types_of(annotation: Any) -> frozenset[type]:
    """Return the plain types in an annotation; empty if it contains any other type."""
    parts = _parts(annotation)
    kinds = {_ORIGINS.get(origin := typing.get_origin(part), origin or part) for part in parts}
    return frozenset(kinds) if kinds <= PLAIN_TYPES else frozenset()


def expected(field: Field[Any]) -> str:
    """Return a description of a setting's type and range."""
    bounds, parts = dict(declaration(field).bounds), _parts(field.type)
    names = [inspect.formatannotation(part).replace("typing.", "") for part in parts if part is not NoneType]
    if known := bounds.pop("one_of", ()):
        text = f"one of {', '.join(map(repr, known))}"
    else:
        limits = [_BOUNDS[name][1].format(bound) for name, bound in bounds.items()]
        text = " ".join([" or ".join(names), " and ".join(limits)]).strip()
    return f"{text}, or None" if NoneType in parts and names else text


# -- checks ------------------------------------------------------------------------------------------------------------


def check_settings(config: Any, prefix: str = "") -> None:
    """Check the plain type and the range of every setting of ``config``.

    An int is accepted as a float; a bool is not accepted as a number. Values that Tune has yet to choose are not checked.

    Args:
        config: an instance of a dataclass.
        prefix: text before the setting's name in the message.

    Raises:
        ConfigError: a value is invalid; the message names the setting, its value and the expected values.
    """
    for name, field in fields_of(type(config)).items():
        value = getattr(config, name)
        if not is_search(value) and not _fits(value, field):
            text = f"{'finite ' if _is_infinite(value) else ''}{expected(field)}"
            article = "" if text.startswith("one of") else "an " if text[0] in "aeiou" else "a "
            raise ConfigError(f"{prefix}{name} is {value!r}, expected {article}{text}.")


def is_search(value: Any) -> bool:
    """Return whether ``value`` is a search space of Ray Tune: ``{"grid_search": [...]}``, or a distribution."""
    if isinstance(value, dict):
        return value.keys() == {"grid_search"}
    return any((base.__module__, base.__name__) == _TUNE_DOMAIN for base in type(value).__mro__)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_infinite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and abs(value) == math.inf


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar known name, with a leading space; empty if no name is similar."""
    known = list(known)
    if (here := NAMES_ELSEWHERE.get(name)) in known:
        return f" It is {here!r} here."
    longer = [setting for setting in known if setting.endswith(f"_{name}")]
    nearest = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _fits(value: Any, field: Field[Any]) -> bool:
    kinds = plain_types_of(field.type)
    if isinstance(value, bool) and kinds and bool not in kinds:
        return False
    if kinds and not any(isinstance(value, _ACCEPTED.get(kind, kind)) for kind in kinds):
        return False
    return value is None or declaration(field).allows(value)


def declaration(field: Field[Any]) -> Declaration:
    """Return the declaration of a field.

    If the field's type is a ``Literal``, or a ``Literal`` or ``None``, the bound ``one_of`` has the values of the ``Literal``,
    unless the field states other values.
    """
    declared: Declaration = field.metadata.get(_METADATA) or Declaration()
    kinds = [part for part in _parts(field.type) if part is not NoneType]
    if [typing.get_origin(kind) for kind in kinds] != [typing.Literal]:
        return declared
    return dataclasses.replace(declared, bounds={"one_of": typing.get_args(kinds[0]), **declared.bounds})


def _parts(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)
