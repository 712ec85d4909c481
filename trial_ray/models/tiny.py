"""The tiny default model: a Qwen3 causal LM of under a million parameters that a CPU trains in minutes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from trial_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Shape of a tiny model. ``head_dim`` is one that vLLM's CPU attention supports (32, 64, 80, ...)."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    intermediate: int


SHAPES = {
    "nano": TinyShape(hidden=64, layers=2, heads=2, head_dim=32, intermediate=160),
    "mini": TinyShape(hidden=96, layers=3, heads=3, head_dim=32, intermediate=256),
    "tiny": TinyShape(hidden=128, layers=4, heads=4, head_dim=32, intermediate=352),
    "small": TinyShape(hidden=256, layers=6, heads=8, head_dim=32, intermediate=704),
}


def build_tiny_model(tokenizer: PreTrainedTokenizerBase, size: str = "tiny", seed: int = 0) -> Qwen3ForCausalLM:
    """Build an untrained Qwen3 model in float32 with input and output embeddings tied.

    Args:
        tokenizer: gives the vocabulary size, and the ids of the end and padding tokens.
        size: a key of ``SHAPES``.
        seed: of the initial weights; the caller's random state is left as it was.

    Raises:
        ConfigError: ``size`` is unknown.
    """
    config = tiny_config(tokenizer, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def tiny_config(tokenizer: PreTrainedTokenizerBase, size: str) -> Qwen3Config:
    """Configuration of a tiny model; arguments and errors as :func:`build_tiny_model`."""
    if size not in SHAPES:
        raise ConfigError(f"Unknown tiny model size {size!r}; choose one of {', '.join(SHAPES)}.")
    shape = SHAPES[size]
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
