"""A tiny random model in the Hugging Face format, and weights under which one token overflows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

VOCAB_SIZE = 300
STOP_ID = 7
OTHER_STOP_ID = 8
"""Named in the generation settings alone, as chat models do with their end-of-turn token."""


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3 with tied embeddings and no tokenizer and two stop tokens."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=STOP_ID,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[STOP_ID, OTHER_STOP_ID], pad_token_id=0)
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def overflow_at() -> Callable[[torch.nn.Module, int], torch.nn.Module]:
    """See :func:`_overflow_at`."""
    return _overflow_at


def _overflow_at(model: torch.nn.Module, token: int) -> torch.nn.Module:
    """Make finite weights under which one token's activations overflow in any dtype, and all others' are ordinary numbers.

    Only the token's embedding has a first component; the first layer's feed-forward network multiplies it beyond all bounds.
    """
    layer, embedding = model.model.layers[0], model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, 0] = 0
        embedding[token] = 0
        embedding[token, 0] = 1
        model.model.norm.weight[0] = 0  # its logit is 0, so that no greedy response holds it
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.gate_proj.weight[:, 0] = layer.mlp.up_proj.weight[:, 0] = 1e25
    return model
