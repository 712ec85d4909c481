"""Settings that are written once: a field of a class with its type, default, documentation and range.

A class of settings derives from :class:`Settings`, declares fields with :func:`setting`, and names the fluent method that
sets them with :class:`Section`. Ranges, ``--set`` and the tables of the documentation read these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from typing import Any, TypeVar

from trial_ray.errors import ConfigError

NoneType = type(None)
PLAIN_TYPES = frozenset({bool, int, float, str, list, tuple, dict, NoneType})
"""Types of values that a command line or a JSON file can hold."""

_ORIGINS = {typing.Literal: str, Mapping: dict, Sequence: list}
"""Plain types of generic annotations."""
_ACCEPTED: dict[type, tuple[type, ...]] = {
    float: (numbers.Real,),
    int: (numbers.Integral,),
    tuple: (tuple, list),
    dict: (Mapping,),
}
"""Further types accepted for a plain type; NumPy registers its scalars as numbers."""
_SEARCHED = ("ray.tune.search.sample", "Domain")
_METADATA = "trial_ray"

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Declaration:
    """Metadata of a setting besides its default.

    Attributes:
        doc: what the setting means, in its unit.
        at_least: smallest value.
        above: number that the value must exceed.
        within: smallest and largest value.
        one_of: the values that are known.
        infinite: whether the value may be infinite, where it is a bound.
        section: the fluent method that sets it.
    """

    doc: str = ""
    at_least: float | None = None
    above: float | None = None
    within: tuple[float, float] | None = None
    one_of: tuple[Any, ...] = ()
    infinite: bool = False
    section: str = ""

    @property
    def range(self) -> dict[str, Any]:
        """The bounds that are set."""
        bounds = {"at_least": self.at_least, "above": self.above, "within": self.within, "one_of": self.one_of}
        return {name: bound for name, bound in bounds.items() if bound not in (None, ())}

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type lies in the range, of several numbers each; NaN lies in none."""
        if self.range and isinstance(value, tuple | list):
            return all(isinstance(each, numbers.Real) and self.allows(each) for each in value)
        return (
            (self.infinite or not _is_infinite(value))
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.within is None or self.within[0] <= value <= self.within[1])
            and (not self.one_of or value in self.one_of)
        )


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
    """Declare a setting in the body of a class of settings: ``name: type = setting(default, "what it means")``.

    A subclass that declares the name again gives it another default or type; documentation and range stay those of the
    inherited one unless it states its own.

    Args:
        default: value of a setting that is not set.
        doc: what the setting means, in its unit.
        factory: makes the default, where that is a dict or list.
        at_least: smallest value.
        above: number that the value must exceed.
        within: smallest and largest value.
        one_of: the values that are known.
        infinite: whether a bound may be infinite, which switches it off.
    """
    declared = Declaration(doc, at_least, above, within, tuple(one_of), infinite)
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={_METADATA: declared})
    return dataclasses.field(default=default, metadata={_METADATA: declared})


class RLlibSettings:
    """Settings that RLlib's config declares, sets and documents, and that this package reads."""

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
    """Base of classes whose fields are settings.

    A subclass becomes a dataclass without methods of its own: instances are made by the class that it is mixed into, which
    calls :func:`set_defaults`. Its fields belong to its :class:`Section`; those of a class without one to the inherited
    section that takes them.

    Raises:
        ConfigError: a setting has no default, no section or no annotation, or an annotation cannot be resolved.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = {name: field for base in reversed(cls.__bases__) for name, field in fields_of(base).items()}
        for name in cls.__dict__.keys() & inherited.keys() - inspect.get_annotations(cls).keys():
            raise ConfigError(f"{cls.__name__}.{name} needs its type: write `{name}: TYPE = setting(DEFAULT)`.")
        dataclass(init=False, repr=False, eq=False, match_args=False)(cls)
        own = [name for name in inspect.get_annotations(cls) if name in fields_of(cls)]
        hints = _resolved(cls, own)
        for name in own:
            field = fields_of(cls)[name]
            if _is_missing(field.default) and _is_missing(field.default_factory):
                raise ConfigError(f"{cls.__name__}.{name} has no default: write `{name}: TYPE = setting(DEFAULT)`.")
            field.type = hints[name]
            field.metadata = types.MappingProxyType({_METADATA: _completed(cls, field, inherited.get(name))})


def _resolved(cls: type, names: list[str]) -> dict[str, Any]:
    """Types that annotations in the body of ``cls`` name; resolved now, because a class that travels leaves its module."""
    if not names:
        return {}  # also the empty class that cloudpickle makes before it fills in attributes, in a process without the module
    written = inspect.get_annotations(cls)
    holder = types.SimpleNamespace(__annotations__={name: written[name] for name in names})
    try:
        return typing.get_type_hints(holder, vars(sys.modules[cls.__module__]))
    except NameError as error:
        raise ConfigError(
            f"The type of a setting of {cls.__name__} is unknown when the class is made: {error}. Import it without "
            "TYPE_CHECKING."
        ) from error


def _completed(cls: type, field: Field[Any], inherited: Field[Any] | None) -> Declaration:
    """The declaration of ``field``, completed by the inherited one."""
    declared = declaration(field)
    if inherited is None:
        own = [name for name, value in vars(cls).items() if isinstance(value, Section)]
        taking = own or [section.name for section in sections_of(cls) if section.of_subclasses]
        if not taking:
            raise ConfigError(f"{cls.__name__}.{field.name} belongs to no section that could set it.")
        return dataclasses.replace(declared, section=taking[0])
    base = declaration(inherited)
    return dataclasses.replace(base, doc=declared.doc or base.doc, **declared.range)


class Section:
    """A fluent method that sets the settings of its class: ``engines = Section("Choose the inference engines.")``.

    Its signature and documentation list the settings, those of the class that it is asked of included. Where RLlib has a
    method of that name, its keywords are taken too.

    Args:
        doc: first sentence of its documentation.
        of_subclasses: whether settings that a subclass declares belong to it too.
    """

    def __init__(self, doc: str, *, of_subclasses: bool = False) -> None:
        self.doc = doc
        self.of_subclasses = of_subclasses

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: Config | None, owner: type[Config]) -> Callable[..., Config]:
        function = self._function(owner)
        return function if instance is None else types.MethodType(function, instance)

    def keywords(self, owner: type) -> dict[str, Field[Any]]:
        """The settings of this section in ``owner``."""
        return {name: field for name, field in fields_of(owner).items() if declaration(field).section == self.name}

    def _function(self, owner: type[Config]) -> Callable[..., Config]:
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
        assign.__module__ = owner.__module__
        assign.__doc__ = self._documentation(keywords, further)
        assign.__signature__ = inspect.Signature(parameters, return_annotation=owner)  # type: ignore[attr-defined]
        return assign

    def further(self, owner: type) -> list[str]:
        """Keywords of RLlib's method of the same name; those that it has given up have no annotation."""
        extended = getattr(super(self.owner, owner), self.name, None)
        parameters = inspect.signature(extended).parameters.values() if extended else ()
        return [
            each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.annotation is not each.empty
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


class RenamedSection:
    """The former name of a section, which sets the same and warns.

    Args:
        section: its name now.
        prefix: what the keywords' names now begin with.
    """

    def __init__(self, section: str, prefix: str = "") -> None:
        self.section, self.prefix = section, prefix

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        def assign(**settings: Any) -> Any:
            named = {f"{self.prefix}{keyword}": value for keyword, value in settings.items()}
            now = f".{self.section}({', '.join(f'{keyword}=...' for keyword in named)})"
            warnings.warn(f".{self.name}() is now {now}; the former name goes with the next version.", FutureWarning, 2)
            return getattr(instance, self.section)(**named)

        return assign


# -- what a class of settings declares ---------------------------------------------------------------------------------


def fields_of(cls: type) -> dict[str, Field[Any]]:
    """The settings of a class, by name."""
    return {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def sections_of(cls: type) -> list[Section]:
    """The fluent methods of a class that set settings, in the order of its bases."""
    return [value for base in cls.__mro__ for value in vars(base).values() if isinstance(value, Section)]


def default_of(field: Field[Any]) -> Any:
    """The default; a new object where a factory makes it."""
    if not _is_missing(field.default):
        return field.default
    factory: Any = field.default_factory
    return factory()


def set_defaults(config: Any) -> None:
    """Give ``config`` every setting of its class as an attribute of its own."""
    for name, field in fields_of(type(config)).items():
        setattr(config, name, default_of(field))


def plain_types(cls: type, name: str) -> frozenset[type]:
    """Plain types of a setting's values; empty where its annotation names any other, or the setting is another one of RLlib's."""
    field = fields_of(cls).get(name)
    return plain_types_of(typing.get_type_hints(RLlibSettings).get(name, Any) if field is None else field.type)


def takes(cls: type, name: str, value: Any) -> bool:
    """Whether a setting takes a value; the types of RLlib's own settings are not declared reliably."""
    field = fields_of(cls).get(name)
    return field is None or _fits(value, field)


def may_be_infinite(cls: type, name: str) -> bool:
    """Whether a setting of the class takes an infinite number."""
    field = fields_of(cls).get(name)
    return field is not None and declaration(field).infinite


def plain_types_of(annotation: Any) -> frozenset[type]:
    """Plain types that an annotation names; empty where it names any other."""
    parts = _parts(annotation)
    kinds = {_ORIGINS.get(origin := typing.get_origin(part), origin or part) for part in parts}
    return frozenset(kinds) if kinds <= PLAIN_TYPES else frozenset()


def expected(field: Field[Any]) -> str:
    """Description of a setting's type and range."""
    declared, parts = declaration(field), _parts(field.type)
    named = [_type_name(part) for part in parts if part is not NoneType]
    bounds = {
        "at_least": "of at least {}".format,
        "above": "above {}".format,
        "within": lambda pair: f"in [{pair[0]}, {pair[1]}]",
    }
    if declared.one_of:
        text = f"one of {', '.join(map(repr, declared.one_of))}"
    else:
        found = [bounds[name](bound) for name, bound in declared.range.items()]
        text = " ".join([" or ".join(named), " and ".join(found)]).strip()
    return f"{text}, or None" if NoneType in parts and named else text


# -- checks ------------------------------------------------------------------------------------------------------------


def check_settings(config: Any, prefix: str = "") -> None:
    """Check the plain type and the range of every setting of ``config``.

    An int serves as a float; a bool never serves as a number. What Tune has still to choose is not checked.

    Args:
        config: an instance of a dataclass.
        prefix: what stands before the setting's name in the message.

    Raises:
        ConfigError: names the setting, what was found and what is expected.
    """
    for name, field in fields_of(type(config)).items():
        value = getattr(config, name)
        if not is_search(value) and not _fits(value, field):
            text = f"{'finite ' if _is_infinite(value) else ''}{expected(field)}"
            article = "" if text.startswith("one of") else "an " if text[0] in "aeiou" else "a "
            raise ConfigError(f"{prefix}{name} is {value!r}, expected {article}{text}.")


def is_search(value: Any) -> bool:
    """Whether ``value`` stands for what Ray Tune chooses: ``{"grid_search": [...]}``, or a distribution."""
    if isinstance(value, dict):
        return value.keys() == {"grid_search"}
    return any((base.__module__, base.__name__) == _SEARCHED for base in type(value).__mro__)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and abs(value) == math.inf


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known name, with a space before it; empty where none is near."""
    known = list(known)
    longer = [each for each in known if each.endswith(f"_{name}")]
    nearest = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _fits(value: Any, field: Field[Any]) -> bool:
    kinds = plain_types_of(field.type)
    if isinstance(value, bool) and kinds and bool not in kinds:
        return False
    if kinds and not isinstance(value, tuple(kind for each in kinds for kind in _ACCEPTED.get(each, (each,)))):
        return False
    return value is None or declaration(field).allows(value)


# -- documentation -----------------------------------------------------------------------------------------------------


def settings_table(cls: type, names: Iterable[str] | None = None) -> str:
    """Settings of a class as a Markdown table: name with default, type and range, meaning.

    Args:
        cls: a class of settings.
        names: which of them, in this order; ``None``: all.
    """
    fields = fields_of(cls)
    lines = ["| setting | type | meaning |", "| --- | --- | --- |"]
    for name in fields if names is None else names:
        doc = declaration(fields[name]).doc.replace("``", "`")
        kind = expected(fields[name]).replace("of at least", "≥").replace("above", ">")
        cells = [f"`{name}={default_of(fields[name])!r}`", kind, doc]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def declaration(field: Field[Any]) -> Declaration:
    """The declaration of a field."""
    return field.metadata.get(_METADATA) or Declaration()


def _is_missing(value: Any) -> bool:
    # Not by identity: a class that travelled by value brings a copy of MISSING with it.
    return isinstance(value, type(MISSING))


def _parts(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _type_name(annotation: Any) -> str:
    return inspect.formatannotation(annotation).replace("typing.", "")
