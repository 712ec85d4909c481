"""Merges an adapter into its base model."""

from __future__ import annotations

from pathlib import Path

import torch

from trial_ray.errors import CheckpointError
from trial_ray.models.folders import write_model
from trial_ray.models.lora import Adapter
from trial_ray.models.module import load_causal_lm


def merge_adapter(folder: Path, target: Path) -> None:
    """Write the model that an adapter in peft's format makes of its base model to ``target``, in Hugging Face format.

    Raises:
        CheckpointError: the base model is not where it was when the adapter was trained.
    """
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(folder))
    base = str(config.base_model_name_or_path)
    if not Path(base).is_dir():
        raise CheckpointError(f"{folder} is an adapter of the model in {base}, which is missing. Put it there again.")
    lm = load_causal_lm(base, "float32")
    adapter = Adapter(
        lm, rank=config.r, alpha=config.lora_alpha, targets=sorted(config.target_modules), dtype=torch.float32, seed=0
    )
    adapter.load(folder)
    write_model(lm, adapter.merged_weights(), target)
