"""The environments of a run: found by id, with their adapters and keyword arguments."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvCreator, EnvSpec, load_env_creator
from ray import cloudpickle

import trial_envs
from trial_envs.errors import UnknownSplitError
from trial_ray.environments import alfworld, webshop
from trial_ray.environments.adapter import MOST_SEEDS, EnvironmentAdapter
from trial_ray.environments.external import GEM, OPENENV, REASONING_GYM, SCIENCEWORLD, TEXTARENA, TEXTWORLD
from trial_ray.errors import ConfigError
from trial_ray.files import without_secrets
from trial_ray.secrets import with_secrets
from trial_ray.user_files import load_user_module

PACKAGED = {
    adapter.env_id: adapter
    for adapter in (
        alfworld.ADAPTER,
        webshop.ADAPTER,
        TEXTWORLD,
        OPENENV,
        TEXTARENA,
        REASONING_GYM,
        GEM,
        SCIENCEWORLD,
    )
}
"""Adapters of this package by environment id."""
UNKNOWN_MAX_TURNS = 50
"""Turns of an episode where nothing names a limit."""
TRAIN = "train"
"""Split that is taken where nothing names one."""
SMALL_SEEDS = ("test", "valid", "validation", "val", "dev", "eval")
"""Splits whose seeds lie below 2³⁰, beside ``train``: environments that take no larger ones can be played in them."""
_HASHED_BLOCKS = 1000
_LONGEST_SPLIT = 64
"""Length of a name in bytes, about that of a seed."""


@dataclass(frozen=True)
class EnvironmentEntry:
    """One environment of a run.

    Attributes:
        spec: what Gymnasium makes it from. It travels with the entry, so that an environment that was registered in the
            driver is known to every actor.
        adapter: what the trainer knows of it.
        config: keyword arguments, and the split under ``"split"``.
        weight: its share of the tasks that are drawn, relative to the other entries; 0: it is evaluated and not trained in.
        name: its name in metrics and records; unique in a run.
    """

    spec: EnvSpec
    adapter: EnvironmentAdapter
    config: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    name: str = ""

    @property
    def env_id(self) -> str:
        """Id under which it is registered."""
        return self.spec.id

    @property
    def split(self) -> str:
        """The split that tasks are drawn from."""
        return str(self.config.get("split", TRAIN))

    @property
    def max_turns(self) -> int:
        """Turns after which an episode is cut: the lowest limit that environment, registration or adapter name."""
        own = self.config.get("max_turns", (keyword_arguments(self.spec) or {}).get("max_turns"))
        limits = [own, self.spec.max_episode_steps, self.adapter.max_turns]
        return min((limit for limit in limits if isinstance(limit, int)), default=UNKNOWN_MAX_TURNS)

    def at(self, **changes: Any) -> EnvironmentEntry:
        """The same environment with other keyword arguments."""
        return replace(self, config={**self.config, **changes})

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make an instance, with the values of secrets. ``split`` is left out for an environment that does not take it.

        Raises:
            ConfigError: the environment does not take a keyword of ``config``, or has no such split, or an environment variable
                that a secret names is not set here.
        """
        known = keyword_arguments(self.spec)
        given = dict(self.config)
        if known is not None:
            if "split" not in known:
                given.pop("split", None)
            for key in given:
                if key not in known:
                    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                    hint = f" Did you mean 'env_config.{nearest[0]}'?" if nearest else ""
                    raise ConfigError(f"Unknown setting 'env_config.{key}'.{hint}")
        with _split_setting_named():
            return gymnasium.make(self.spec, disable_env_checker=True, **with_secrets(given))

    def listed_tasks(self) -> list[str] | None:
        """Task ids of the split in the order of ``env.unwrapped.tasks(split)``; ``None`` if tasks are seeds.

        Raises:
            ConfigError: the environment has no such split.
        """
        env = self.make()
        try:
            listed = getattr(env.unwrapped, "tasks", None)
            with _split_setting_named():
                return [str(task) for task in listed(self.split)] if callable(listed) else None
        finally:
            env.close()

    def tasks(self) -> list[str]:
        """Task ids of the split in a fixed order: the listed ones, else seeds."""
        listed = self.listed_tasks()
        return seed_tasks(self.split, self.adapter.num_seeds) if listed is None else listed

    def describe(self) -> dict[str, Any]:
        """Fields that decide the environment's tasks and prompts, as plain values, without secrets."""
        own = {} if self.adapter == find_adapter(self.env_id) else {"adapter": self.adapter.describe()}
        return {"env_id": self.env_id, "config": without_secrets(self.config), "weight": self.weight, **own}


@contextmanager
def _split_setting_named() -> Iterator[None]:
    try:
        yield
    except UnknownSplitError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}. Set it with env_config={{'split': ...}} for training, evaluation_split=... for an "
            "evaluation set, --split in trial-ray evaluate."
        ) from error


def seed_tasks(split: str, number: int) -> list[str]:
    """Task ids of an environment whose tasks are the seeds of ``reset``; no two splits share any.

    ``train`` starts at 0, each of :data:`SMALL_SEEDS` at a multiple of a million below 2³⁰, and any other split at a larger one,
    which spells its name.

    Raises:
        ConfigError: too many tasks, or the name is too long.
    """
    if split == TRAIN:
        return _block(0, number)
    if split in SMALL_SEEDS:
        return _block(_hashed_block(split), number)
    spelt = split.encode("utf-8", "surrogatepass")
    if len(spelt) > _LONGEST_SPLIT:
        raise ConfigError(
            f"The name of the split {split!r:.200} has {len(spelt)} bytes, expected at most {_LONGEST_SPLIT}."
        )
    return _block(_HASHED_BLOCKS + int.from_bytes(b"\1" + spelt), number)


def warm_start_seed_tasks(generator_seed: int, number: int) -> list[str]:
    """Task ids of a warm start where tasks are seeds; no split has any of them.

    Raises:
        ConfigError: too many tasks, or they are those of one of :data:`SMALL_SEEDS`.
    """
    block = _hashed_block(f"warm start {generator_seed}")
    for split in SMALL_SEEDS:
        if block == _hashed_block(split):
            raise ConfigError(
                f"The warm start's generator_seed {generator_seed} selects the seeds of the split {split!r}; choose another seed."
            )
    return _block(block, number)


def _hashed_block(name: str) -> int:
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % _HASHED_BLOCKS


def _block(block: int, number: int) -> list[str]:
    if number > MOST_SEEDS:
        raise ConfigError(f"A split whose tasks are seeds has at most {MOST_SEEDS:,} tasks; got {number:,}.")
    return [str(block * MOST_SEEDS + index) for index in range(number)]


def find_spec(env_id: Any) -> EnvSpec:
    """Gymnasium's spec of an id (``module:id`` imports the module first), ready for actors.

    Raises:
        ConfigError: not an id, or nothing is registered under it.
    """
    if not isinstance(env_id, str):
        raise ConfigError(
            f"env is {env_id!r:.200}, expected the id of an environment that is registered with gymnasium.register(id=..., "
            "entry_point=...)."
        )
    trial_envs.register()
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            import_module(module)
        spec = gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(
            f"No environment is registered as {env_id!r} ({error}). Register it with gymnasium.register(id=..., "
            "entry_point=...) in the file that names it, or name a registered one, such as trial/ALFWorld-v0."
        ) from error
    return travelling(spec)


def travelling(spec: EnvSpec) -> EnvSpec:
    """The spec with the class itself in place of a path that actors could not import.

    Raises:
        ConfigError: the class, or an argument that it is registered with, cannot be pickled.
    """
    entry_point = spec.entry_point
    if isinstance(entry_point, str):
        module = sys.modules.get(entry_point.partition(":")[0])
        if module is None or module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            return spec
        # A path to a class gives that class; Gymnasium declares what a path to a vector environment would give, too.
        spec = replace(spec, entry_point=cast(EnvCreator, load_env_creator(entry_point)))
    try:
        cloudpickle.dumps(spec)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"The environment {spec.id} cannot be sent to actors: {error}. Keep open files, locks and processes out of its class "
            "and its registered arguments."
        ) from error
    return spec


def keyword_arguments(spec: EnvSpec) -> dict[str, Any] | None:
    """Keyword arguments of the environment's constructor with their defaults; ``None`` if anything may be passed."""
    entry_point = spec.entry_point
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        if creator is None:
            return None
        parameters = inspect.signature(creator).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def find_adapter(env_id: str, adapters: Sequence[EnvironmentAdapter] = ()) -> EnvironmentAdapter:
    """The adapter of an environment: one of ``adapters``, else this package's, else one of default values."""
    name = env_id.rpartition(":")[2]
    own = {adapter.env_id: adapter for adapter in adapters}
    return own.get(name) or PACKAGED.get(name) or EnvironmentAdapter(name)


def make_entries(
    environments: Sequence[tuple[str, Mapping[str, Any], float]],
    adapters: Sequence[EnvironmentAdapter] = (),
    specs: Mapping[str, EnvSpec] | None = None,
) -> tuple[EnvironmentEntry, ...]:
    """The environments of a run.

    Args:
        environments: id, keyword arguments and weight of each.
        adapters: adapters of the user's.
        specs: specs by id that were found before; others are looked up.

    Raises:
        ConfigError: nothing is registered under an id, or an adapter belongs to none of them.
    """
    entries: list[EnvironmentEntry] = []
    for env_id, env_config, weight in environments:
        spec = (specs or {}).get(env_id) or find_spec(env_id)
        base = name = spec.id.rpartition("/")[2]
        number = 1
        while name in [entry.name for entry in entries]:
            number += 1
            name = f"{base}-{number}"
        entries.append(EnvironmentEntry(spec, find_adapter(spec.id, adapters), dict(env_config), weight, name))
    for adapter in adapters:
        if adapter.env_id not in [entry.env_id for entry in entries]:
            raise ConfigError(
                f"The adapter is for {adapter.env_id!r}, but the run plays {', '.join(entry.env_id for entry in entries)}. Set its "
                "env_id to the id of its environment."
            )
    return tuple(entries)


def load_adapters(files: Iterable[Path]) -> tuple[EnvironmentAdapter, ...]:
    """The ``ADAPTER`` of every file. A file may also register the environment that its adapter is of.

    Raises:
        ConfigError: a file is missing, defines no adapter, or one that cannot be used.
        UserInputError: a file fails; names the line.
    """
    adapters = []
    for file in files:
        module = load_user_module(file, "ADAPTER")
        found = getattr(module, "ADAPTER", None)
        if not isinstance(found, EnvironmentAdapter):
            others = [name for name, value in vars(module).items() if isinstance(value, EnvironmentAdapter)]
            seen = (
                f"an adapter named {others[0]}"
                if others
                else f"{found!r:.200}"
                if found is not None
                else "no such name"
            )
            raise ConfigError(f"{file} must define ADAPTER, a trial_ray.environments.EnvironmentAdapter, got {seen}.")
        found.check()
        adapters.append(found)
    return tuple(adapters)
