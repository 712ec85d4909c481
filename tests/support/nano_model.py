"""The smallest untrained model as a model folder: what tests train, sample from and export where its skill does not matter."""

import torch
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.models.tiny import build_tiny_model, build_tokenizer


def tiny_tokenizer():
    """Build the tokenizer of tiny models."""
    return build_tokenizer(ADAPTER.warm_start.vocabulary)


def save_nano_model(folder, seed=0, size="nano"):
    """Write an untrained model and its tokenizer to ``folder`` (created), in Hugging Face format."""
    tokenizer = tiny_tokenizer()
    build_tiny_model(tokenizer, size, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_exact_model(folder, seed=0):
    """Like :func:`save_nano_model`, of an architecture that computes all that has a gradient in its own precision.

    Qwen and Llama normalise in float32 even in a float64 model, which rounds the gradient of a node that rows share once, and
    those of the same token in separate rows each.
    """
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = Starcoder2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    Starcoder2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
