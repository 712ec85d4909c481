"""The smallest untrained model as a model folder: what tests train, sample from and export where its skill does not matter."""

from __future__ import annotations

from pathlib import Path

from trial_ray.environments.alfworld import ADAPTER
from trial_ray.models.tiny import build_tiny_model
from trial_ray.models.tokenizer import build_tokenizer


def save_nano_model(folder: Path, seed: int = 0) -> Path:
    """Write an untrained model of size ``nano`` and its tokenizer to ``folder`` (created), in Hugging Face format."""
    tokenizer = build_tokenizer(ADAPTER.vocabulary)
    build_tiny_model(tokenizer, "nano", seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
