"""From what a user calls a model to a folder on this machine: the only module that asks the model hub."""

from __future__ import annotations

import re
from pathlib import Path

from trial_ray.errors import ConfigError

HUB_TIMEOUT_S = 10.0
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configurations, tokenizer and chat template."""
WEIGHTS = ("*.safetensors", "*.bin")
"""Formats of weights; the second is fetched only where the first is missing."""
IGNORED = ("*/*", "consolidated*")
"""Copies of the weights in formats of other libraries."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(model_path: str) -> str:
    """The folder of a causal LM in Hugging Face format that ``model_path`` means, as an absolute path.

    A name that is no folder is taken for the name of a repository on the model hub and fetched into the hub's cache
    (``HF_HOME``); where the hub cannot be asked, what the cache holds is used.

    Raises:
        ConfigError: it is neither a model folder nor a repository that can be fetched.
    """
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        folder = _fetch(model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_path: {folder} holds no config.json; give a folder in Hugging Face format.")
    # Actors may have another working directory.
    return str(folder.absolute())


def config_file(model_path: str) -> Path:
    """``config.json`` of a model folder or of a repository on the model hub, without its weights.

    Raises:
        ConfigError: there is none.
    """
    from huggingface_hub import hf_hub_download

    file = Path(model_path).expanduser() / "config.json"
    if file.is_file():
        return file
    failure: Exception | None = None
    if _HUB_NAME.fullmatch(model_path):
        failure = _ask_hub(model_path)
        try:
            return Path(hf_hub_download(model_path, "config.json", local_files_only=failure is not None))
        except _hub_errors() as error:
            failure = failure or error
    hub = f", and the model hub gave none: {_line(failure)}" if failure else ""
    raise ConfigError(
        f"model_path: there is no folder {model_path!r} with a config.json{hub}. Give the model's folder."
    )


def _fetch(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model_path: there is no folder {name!r}, and it is not the name of a model on the hub.")
    failure = _ask_hub(name)
    try:
        for weights in WEIGHTS:
            folder = _snapshot(name, weights, cached=failure is not None)
            if any(folder.glob(weights)):
                return folder
    except _hub_errors() as error:
        raise ConfigError(
            f"model_path: there is no folder {name!r}, and the model hub gave none: {_line(failure or error)}. Where the "
            f"hub can be reached, run `hf download {name} --local-dir FOLDER`, then set model_path to that folder."
        ) from error
    raise ConfigError(
        f"model_path: {name!r} on the model hub holds no weights ({' or '.join(WEIGHTS)}); choose another model."
    )


def _ask_hub(name: str) -> Exception | None:
    """Why the hub does not offer the repository, if so: one request with a deadline, which a download would not have."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except _hub_errors() as error:
        return error
    return None


def _hub_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises when it cannot be asked, or offers no such model."""
    # The class of the hub's own HTTP library, which differs between its versions and is not declared as exported.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return OSError, ValueError, HTTPError


def _snapshot(name: str, weights: str, *, cached: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*FILES, weights]
    return Path(
        snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(IGNORED), local_files_only=cached)
    )


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__
