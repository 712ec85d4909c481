"""A small model fitted to a few texts in some seconds, for tests in which a model from scratch would never act sensibly."""

import torch
from chat_tokenizers import chat_template, chat_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM


def fit_tokenizer(template, texts):
    """A tokenizer with the chat template of a published model and a vocabulary of the texts, so that these are short.

    Args:
        template: name of a template of :mod:`chat_tokenizers`, such as ``qwen3``.
        texts: what it will encode.
    """
    tokenizer = chat_tokenizer(template).train_new_from_iterator(texts, vocab_size=1500)
    tokenizer.chat_template = chat_template(template)
    return tokenizer


def fit_model(tokenizer, texts, steps=300, window=None):
    """Trains a Qwen3 of two layers, from a fixed seed, to write the texts.

    Args:
        tokenizer: its end and padding tokens become the model's.
        texts: all of each text is predicted, in every step.
        steps: steps of AdamW, whose learning rate falls to 0.
        window: tokens that a layer reads back. Two layers then predict from the last ``2 * window - 1`` tokens alone, so a model
            fitted to responses without a prompt writes them after every prompt.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            use_sliding_window=window is not None,
            sliding_window=window,
            max_window_layers=0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / steps)
        loss = model(**encoded, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model
