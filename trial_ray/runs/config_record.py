"""A resolved config as JSON: written into every run folder, and read back without unpickling anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import CheckpointError
from trial_ray.runs.methods import method_of, new_config
from trial_ray.runs.overrides import settable_names

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

SCHEMA = "trial_ray/config"
SCHEMA_VERSION = 1


def to_record(config: AlgorithmConfig) -> dict[str, Any]:
    """Every setting of ``config`` that JSON can hold, and under ``other`` how the rest would print."""
    settings, other = {}, {}
    names = settable_names(vars(config))
    for name, value in sorted(vars(config).items()):
        if name.startswith("_"):
            continue
        if name in names and _is_json(value):
            settings[name] = value
        else:
            other[name] = repr(value)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "method": method_of(config),
        "settings": settings,
        "other": other,
    }


def from_record(record: Any) -> AlgorithmConfig:
    """A fresh config of the recorded method with the recorded settings; what is under ``other`` keeps its default.

    Raises:
        CheckpointError: not such a record, or of another version.
    """
    if not isinstance(record, dict) or (record.get("schema"), record.get("schema_version")) != (SCHEMA, SCHEMA_VERSION):
        raise CheckpointError(f"Expected a resolved config of schema {SCHEMA} version {SCHEMA_VERSION}.")
    config = new_config(record["method"])
    defaults = vars(config)
    for name in settable_names(defaults):
        if name in record["settings"]:
            value = record["settings"][name]
            setattr(config, name, tuple(value) if isinstance(defaults[name], tuple) else value)
    return config


def load_record(path: Path) -> AlgorithmConfig:
    """Read the config that a run folder's ``resolved_config.json`` holds.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    try:
        return from_record(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"Cannot read the resolved config {path}: {error}.") from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
