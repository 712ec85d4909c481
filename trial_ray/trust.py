"""Signatures, and checks of folders that another user may have written.

A pickle can run any program, and a folder's owner and permissions prove nothing: a downloaded folder belongs to the user who
downloaded it. Therefore, files that a run writes are signed with a key that no other user or machine has. Pickles are loaded
only from signed folders. If recorded settings are not signed, only settings that cannot name code, files or servers are read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from trial_ray.errors import CheckpointError
from trial_ray.files import Json, Record, cache_root, partial_of, read_json, write_json
from trial_ray.secrets import REFERENCE

logger = logging.getLogger(__name__)


# -- signatures -------------------------------------------------------------------------------------------------------

KEY_FILE = "signing.key"
MARK = "origin.json"
"""Name of the file that marks a folder as created by this user."""
_KEY_BYTES = 32


def signature(content: bytes) -> str:
    """Return the HMAC-SHA256 of ``content`` with this user's key, hexadecimal."""
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


def is_signed(content: bytes, claimed: object) -> bool:
    """Return True if ``claimed`` is the :func:`signature` of ``content``."""
    if not isinstance(claimed, str):
        return False
    return hmac.compare_digest(signature(content).encode(), claimed.encode(errors="replace"))


def sign_folder(folder: Path) -> None:
    """Mark a folder as created by this user on this machine; its files are not signed, since Ray Tune keeps changing them."""
    write_json(folder / MARK, {"signature": signature(_identity(folder))})


def require_own_folder(folder: Path) -> None:
    """Check for the mark of :func:`sign_folder`; a copied or moved folder has no valid mark.

    Raises:
        CheckpointError: there is no valid mark.
    """
    with suppress(CheckpointError):
        if is_signed(_identity(folder), read_json(folder / MARK).get("signature")):
            return
    raise CheckpointError(
        f"{folder} has pickles, which can run any program. It may come from another user, because this user did not start it on "
        "this machine, or it was moved. Give --trust if you know where it comes from."
    )


def _identity(folder: Path) -> bytes:
    return f"{folder.resolve()}\0{folder.stat().st_ino}".encode(errors="surrogateescape")


def _key() -> bytes:
    """Return this user's signing key; if its file cannot be read or created, return a key that only this process has."""
    path = Path(KEY_FILE)
    try:
        path = cache_root() / KEY_FILE
        return _read_key(path) if path.exists() else _create_key(path)
    except (OSError, RuntimeError) as error:  # Path.home() raises a RuntimeError without a home folder.
        logger.warning(
            "%s cannot be used (%s): checkpoints of this process can be resumed elsewhere only with --trust",
            path,
            error,
        )
        return _key_of_this_process()


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError("other users can read or change it; remove it, and a new one is created")
        key = file.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"it has {len(key)} bytes, {_KEY_BYTES} were expected; remove it, and a new one is created")
    return key


def _create_key(path: Path) -> bytes:
    """Create and return the key; processes that create it at the same time return the same key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
        except OSError:  # The file system has no hard links.
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return _read_key(path)


@cache
def _key_of_this_process() -> bytes:
    return secrets.token_bytes(_KEY_BYTES)


# -- settings -----------------------------------------------------------------------------------------------------------

RLLIB = frozenset(
    {
        "custom_resources_per_env_runner",
        "custom_resources_per_learner",
        "grad_clip_by",
        "num_cpus_per_env_runner",
        "num_gpus_per_env_runner",
    }
)
"""RLlib's settings that are read from unsigned files, besides those that this package uses; all others keep their defaults."""
ENGINE = frozenset(
    {
        "batch_invariant",
        "block_size",
        "device",
        "dtype",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_gib",
        "kv_cache_memory_bytes",
        "log_level",
        "max_batch",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_threads",
        "seed",
        "tensor_parallel_size",
        "v2_model_runner",
    }
)
"""Engine arguments that are read from unsigned files. Other fields of vLLM's ``EngineArgs`` import classes or load files."""
ENVIRONMENT = frozenset(
    {
        "action_field",
        "actions",
        "dataset",
        "difficulty",
        "families",
        "game",
        "list_actions",
        "observation_field",
        "simplifications",
        "split",
        "task",
    }
)
"""Environment arguments that are read from unsigned files, because they only select options; numbers are always read."""
MAX_NAMES = 20
"""Maximum number of dropped settings that a warning names."""


def require_data(settings: Record, known: Iterable[str], defaults: Record, source: object) -> Json:
    """Return settings from an unsigned file, without values that could name code, files or servers.

    A warning names the dropped settings and arguments, except for settings with their default values.

    Args:
        settings: the recorded settings.
        known: names of the settings to read.
        defaults: defaults of all settings.
        source: the file with the recorded settings.

    Raises:
        TypeError, ValueError, AttributeError: a setting has another type than a run records.
    """
    dropped: list[str] = []
    data = {name: _data(name, settings[name], dropped) for name in settings.keys() & set(known)}
    dropped += [name for name in settings.keys() & defaults.keys() - data.keys() if settings[name] != defaults[name]]
    if dropped:
        names = ", ".join(f"{name!r:.80}" for name in sorted(set(dropped))[:MAX_NAMES])
        logger.warning(
            "%s was not written by this user on this machine; its settings that may name code, files or servers are ignored: %s%s. "
            "Set the ones that you want with --set.",
            source,
            names,
            ", ..." if len(dropped) > MAX_NAMES else "",
        )
    return data


def _data(name: str, value: Any, dropped: list[str]) -> Any:
    """Return the part of a setting's value that cannot name code, files or servers; add other parts' names to ``dropped``."""
    if not value:
        return value
    if name == "env":
        return _without_module(name, value, dropped)
    if name == "engine_kwargs":
        dropped += [f"{name}.{key}" for key in value.keys() - ENGINE]
        return {key: inner for key, inner in value.items() if key in ENGINE and not isinstance(inner, Mapping | list)}
    if name in ("env_config", "evaluation_env_config"):
        return _arguments(name, value, dropped)
    if name == "environments":
        return [
            [_without_module(name, env_id, dropped), _arguments(name, arguments, dropped), weight]
            for env_id, arguments, weight in value
        ]
    if name == "warm_start":
        return {key: _data(key, inner, dropped) for key, inner in value.items()}
    return value


def _without_module(name: str, env_id: str, dropped: list[str]) -> str:
    """Return an environment's id without the module in front of it (``module:id``), which Gymnasium would import."""
    module, _, registered = env_id.rpartition(":")
    if module:
        dropped.append(f"{name} {module}:")
    return registered


def _arguments(name: str, arguments: Record, dropped: list[str]) -> Json:
    """Return an environment's keyword arguments without those that could name code, files or servers.

    Names of omitted arguments are added to ``dropped``. A value that is a mapping (such as the arguments of one of several
    environments) is filtered in the same way. Values that refer to an environment variable of this user are omitted, too.
    """
    data = {}
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            data[key] = _arguments(f"{name}.{key}", value, dropped)
        # Search the text of the value: the text of a list contains all nested values.
        elif (key in ENVIRONMENT and not REFERENCE.search(str(value))) or value is None or type(value) in (int, float):
            data[key] = value
        else:
            dropped.append(f"{name}.{key}")
    return data
