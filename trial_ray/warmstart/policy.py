"""The model that a warm start begins with, and where it computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import ChatTemplateError, CheckpointError, ConfigError
from trial_ray.models.tiny import build_tiny_model, build_tokenizer
from trial_ray.warmstart.demonstrations import collect_texts
from trial_ray.warmstart.settings import WarmStartSettings


def model_files(folder: Path) -> list[Path]:
    """The files that make a model and its tokenizer.

    Raises:
        CheckpointError: ``folder`` holds no model.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model: config.json is missing. Give a folder in Hugging Face format.")
    return [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model")]


RECORD = "warmstart.json"
"""What a warm start says of itself, beside the model that it made."""


def recorded_settings(folder: Path) -> WarmStartSettings:
    """The settings that a model was warm-started with; the defaults for a model of other origin.

    Raises:
        CheckpointError: the record cannot be read.
    """
    path = folder / RECORD
    if not path.is_file():
        return WarmStartSettings()
    try:
        return WarmStartSettings(**json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no record of a warm start of this version ({type(error).__name__}: {error}). Remove it, and state the "
            "settings with --set."
        ) from error


def load_policy(settings: WarmStartSettings, entry: EnvironmentEntry) -> tuple[PreTrainedModel, Any]:
    """The model to clone into, in float32, and its tokenizer.

    Raises:
        CheckpointError: ``model_path`` holds no causal LM with a tokenizer.
        ChatTemplateError: the tokenizer has no chat template or no end token.
    """
    if settings.model_path is None:
        vocabulary = entry.adapter.vocabulary
        built = build_tokenizer(vocabulary, () if vocabulary else collect_texts(settings, entry))
        return build_tiny_model(built, settings.size, settings.seed), built
    model_files(Path(settings.model_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
        model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{settings.model_path} holds no causal LM that transformers can load: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ChatTemplateError(f"The tokenizer in {settings.model_path} has no end token; set its eos_token.")
    return model, tokenizer


@contextmanager
def computing_with(settings: WarmStartSettings) -> Iterator[None]:
    """PyTorch with the settings' number of threads, and afterwards with as many as before.

    Raises:
        ConfigError: ``device`` is ``cuda`` where there is none.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "The warm start's setting device is 'cuda', but PyTorch finds no CUDA device here; set device=cpu, or compute on a "
            "machine that has one."
        )
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
