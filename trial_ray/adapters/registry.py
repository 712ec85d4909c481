"""Environments of a run: lookup by id, adapters and keyword arguments."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import pickle
import sys
from collections import Counter
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
from trial_ray.adapters import alfworld, search_qa, webshop
from trial_ray.adapters.adapter import MAX_SEEDS, EnvironmentAdapter
from trial_ray.adapters.external import GEM, OPENENV, REASONING_GYM, SCIENCEWORLD, TEXTARENA, TEXTWORLD
from trial_ray.errors import ConfigError
from trial_ray.secrets import with_secrets, without_secrets
from trial_ray.user_files import load_user_module

PACKAGED = {
    adapter.env_id: adapter
    for adapter in (
        alfworld.ADAPTER,
        webshop.ADAPTER,
        search_qa.ADAPTER,
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
"""Maximum number of turns of an episode if no limit is specified."""
TRAIN = "train"
"""Split that is used by default."""
SMALL_SEEDS = ("test", "valid", "validation", "val", "dev", "eval")
"""Splits whose seeds, like those of ``train``, are below 2³⁰, because some environments do not accept larger seeds."""
_HASHED_BLOCKS = 1000
"""Number of blocks of a million seeds after the block of ``train``. A hash assigns one of these blocks to each split in
:data:`SMALL_SEEDS`, by its name, and to each warm start, by its ``generator_seed``."""
_MAX_SPLIT_BYTES = 64
"""Maximum length of a split's name, which is encoded in its seeds."""


@dataclass(frozen=True)
class EnvironmentEntry:
    """One environment of a run.

    Attributes:
        spec: spec from which Gymnasium creates the environment. It is sent with the entry, so every actor can create an
            environment that was registered in the driver.
        adapter: the environment's adapter.
        config: keyword arguments of the environment, and the split of its tasks under ``"split"``.
        weight: share of the drawn tasks, relative to the other entries; 0 if the environment is only evaluated.
        name: name in metrics and records; unique in a run.
    """

    spec: EnvSpec
    adapter: EnvironmentAdapter
    config: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    name: str = ""

    @property
    def env_id(self) -> str:
        """Id of the environment in Gymnasium's registry."""
        return self.spec.id

    @property
    def split(self) -> str:
        """Split from which tasks are drawn."""
        return str(self.config.get("split", TRAIN))

    @property
    def max_turns(self) -> int:
        """Maximum number of turns of an episode: the lowest limit of environment, registration and adapter."""
        known = {**(keyword_arguments(self.spec) or {}), **self.spec.kwargs, **self.config}
        limits = [known.get("max_turns"), self.spec.max_episode_steps, self.adapter.max_turns]
        return min((limit for limit in limits if isinstance(limit, int)), default=UNKNOWN_MAX_TURNS)

    def with_config(self, **changes: Any) -> EnvironmentEntry:
        """Return a copy of the entry with changed keyword arguments."""
        return replace(self, config={**self.config, **changes})

    def make(self) -> gymnasium.Env[Any, Any]:
        """Create an instance, with secrets read from environment variables; ``split`` is omitted if it is not accepted.

        Raises:
            ConfigError: the environment does not accept a keyword of ``config``, or does not have the split, or an environment
                variable that a secret names is not set in this process.
        """
        known = keyword_arguments(self.spec)
        arguments = dict(self.config)
        if known is not None:
            # The environment of an agent program uses `max_turns` to reject chat requests after the last turn.
            if "max_turns" in known and self.adapter.max_turns is not None:
                arguments["max_turns"] = self.max_turns
            if "split" not in known:
                arguments.pop("split", None)
            for key in arguments:
                if key not in known:
                    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                    hint = f" Did you mean 'env_config.{nearest[0]}'?" if nearest else ""
                    raise ConfigError(f"Unknown setting 'env_config.{key}'.{hint}")
        with _split_setting_in_message():
            return gymnasium.make(self.spec, disable_env_checker=True, **with_secrets(arguments))

    def listed_tasks(self) -> list[str] | None:
        """Return the task ids of the split in the order of ``env.unwrapped.tasks(split)``; ``None`` if there is no such method.

        Raises:
            ConfigError: the environment does not have the split.
        """
        env = self.make()
        try:
            list_tasks = getattr(env.unwrapped, "tasks", None)
            with _split_setting_in_message():
                tasks = list(list_tasks(self.split)) if callable(list_tasks) else None
        finally:
            env.close()
        if other := [task for task in tasks or () if not isinstance(task, str)]:
            raise ConfigError(
                f"{self.env_id}: tasks({self.split!r}) has {other[0]!r} ({type(other[0]).__name__}); expected strings, which "
                "reset(options={'task': ...}) receives."
            )
        return tasks

    def tasks(self) -> list[str]:
        """Return the task ids of the split in a fixed order: those that the environment lists, else seeds."""
        listed = self.listed_tasks()
        if listed is None:
            return seed_tasks(self.split, self.adapter.num_seeds)
        if len(listed) > len(set(listed)):
            repeated, _ = Counter(listed).most_common(1)[0]
            raise ConfigError(
                f"{self.env_id} lists the task {repeated!r:.200} twice in the split {self.split!r}, expected every task once."
            )
        return listed

    def describe(self) -> dict[str, Any]:
        """Return the fields that determine the environment's tasks and prompts, as plain values, without secrets."""
        own = {} if self.adapter == find_adapter(self.env_id) else {"adapter": self.adapter.describe()}
        return {"env_id": self.env_id, "config": without_secrets(self.config), "weight": self.weight, **own}


@contextmanager
def _split_setting_in_message() -> Iterator[None]:
    """Re-raise the error for an unknown split with the names of the settings that select a split."""
    try:
        yield
    except UnknownSplitError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}. Set it with env_config={{'split': ...}} for training, evaluation_split=... for an "
            "evaluation set, --split in trial-ray evaluate."
        ) from error


def seed_tasks(split: str, number: int) -> list[str]:
    """Return the task ids of an environment with the seeds of ``reset`` as tasks; no two splits share a seed.

    ``train`` starts at 0, each split in :data:`SMALL_SEEDS` at a multiple of a million below 2³⁰, and any other split at a
    larger seed that encodes its name.

    Raises:
        ConfigError: there are too many tasks, or the name is too long.
    """
    if split == TRAIN:
        return _block(0, number)
    if split in SMALL_SEEDS:
        return _block(_hashed_block(split), number)
    encoded = split.encode("utf-8", "surrogatepass")
    if len(encoded) > _MAX_SPLIT_BYTES:
        raise ConfigError(
            f"The name of the split {split!r:.200} has {len(encoded)} bytes, expected at most {_MAX_SPLIT_BYTES}."
        )
    return _block(_HASHED_BLOCKS + int.from_bytes(b"\1" + encoded), number)


def warm_start_seed_tasks(generator_seed: int, number: int) -> list[str]:
    """Return seeds as the task ids of a warm start in an environment that lists no tasks; no split contains these seeds.

    Raises:
        ConfigError: there are too many tasks, or they are the seeds of a split in :data:`SMALL_SEEDS`.
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
    if number > MAX_SEEDS:
        raise ConfigError(f"A split whose tasks are seeds has at most {MAX_SEEDS:,} tasks; got {number:,}.")
    return [str(block * MAX_SEEDS + index) for index in range(number)]


def find_spec(env_id: Any) -> EnvSpec:
    """Find Gymnasium's spec of an id (``module:id`` imports the module first), ready to be sent to actors.

    Raises:
        ConfigError: ``env_id`` is not an id, or no environment is registered under it.
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
    return picklable_spec(spec)


def picklable_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec in a form that can be sent to actors: with the environment's class if actors cannot import its path.

    Raises:
        ConfigError: the class, or an argument of its registration, cannot be pickled.
    """
    entry_point = spec.entry_point
    if isinstance(entry_point, str):
        module = sys.modules.get(entry_point.partition(":")[0])
        if module is None or module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            return spec
        # The return type of `load_env_creator` also covers vector environments, but `entry_point` creates none.
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
    """Return the keyword arguments of the environment's constructor with their defaults.

    The result is ``None`` if any keyword may be passed, or if the signature cannot be read.
    """
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
    """Find the adapter of an environment: in ``adapters``, else in this package, else create an adapter with default values."""
    name = env_id.rpartition(":")[2]
    own = {adapter.env_id: adapter for adapter in adapters}
    return own.get(name) or PACKAGED.get(name) or EnvironmentAdapter(name)


def make_entries(
    environments: Sequence[tuple[str, Mapping[str, Any], float]],
    adapters: Sequence[EnvironmentAdapter] = (),
    specs: Mapping[str, EnvSpec] | None = None,
) -> tuple[EnvironmentEntry, ...]:
    """Create the entries of a run's environments.

    Args:
        environments: id, keyword arguments and weight of each environment.
        adapters: the user's adapters.
        specs: known Gymnasium specs by environment id; a missing spec is looked up.

    Raises:
        ConfigError: no environment is registered under an id, or an adapter belongs to none of the environments.
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
    """Load the ``ADAPTER`` of every file. A file may also register the adapter's environment.

    Raises:
        ConfigError: a file is missing, or does not define an adapter that can be used.
        UserInputError: a file raises an error; the message names the line.
    """
    adapters = []
    for file in files:
        module = load_user_module(file, "ADAPTER")
        adapter = getattr(module, "ADAPTER", None)
        if not isinstance(adapter, EnvironmentAdapter):
            others = [name for name, value in vars(module).items() if isinstance(value, EnvironmentAdapter)]
            seen = (
                f"an adapter named {others[0]}"
                if others
                else f"{adapter!r:.200}"
                if adapter is not None
                else "no such name"
            )
            raise ConfigError(f"{file} must define ADAPTER, a trial_ray.adapters.EnvironmentAdapter, got {seen}.")
        adapter.check()
        adapters.append(adapter)
    return tuple(adapters)
