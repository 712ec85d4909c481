"""Tiny untrained models and their tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trial_ray.errors import ConfigError

POSITIONS = 4096
"""Maximum number of tokens of a prompt and its response together; the default settings require fewer."""


HEAD_DIM = 32
"""Size of the attention heads; vLLM's attention on CPUs supports only some sizes, such as 32, 64 and 80."""
SHAPES: dict[str, dict[str, Any]] = {
    "nano": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 160},
    "mini": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 256},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 352},
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 704},
}


def build_tiny_model(tokenizer: PreTrainedTokenizerBase, size: str, seed: int = 0) -> Qwen3ForCausalLM:
    """Build an untrained Qwen3 model in float32 with tied input and output embeddings.

    Args:
        tokenizer: tokenizer with the vocabulary size and the ids of the end and padding tokens.
        size: a key of ``SHAPES``.
        seed: seed of the initial weights; the caller's random state is left unchanged.

    Raises:
        ConfigError: ``size`` is unknown.
    """
    config = tiny_config(tokenizer, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def tiny_config(tokenizer: PreTrainedTokenizerBase, size: str) -> Qwen3Config:
    """Return the configuration of a tiny model; arguments and errors as in :func:`build_tiny_model`."""
    if size not in SHAPES:
        raise ConfigError(f"Unknown tiny model size {size!r}; choose one of {', '.join(SHAPES)}.")
    return Qwen3Config(
        **SHAPES[size],
        vocab_size=len(tokenizer),
        num_key_value_heads=SHAPES[size]["num_attention_heads"],
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PIECE = r" ?[A-Za-z]+| ?[0-9]+|\n+| ?[^\sA-Za-z0-9]+|\s"
"""Regex of the pieces of text that may become tokens.

A piece is a word, a number or a run of marks, each with an optional space before it, or a run of line breaks, or one space.
"""

MAX_NUMBER = 40
"""Largest number that is one token; environments number objects of the same type, as in "drawer 12"."""

PROMPT_WORDS = """
Action Actions Admissible After Before Choose History Last No Now Observation Outcome Reply Result Step Task The This
action actions admissible after answer before command done episode failed game goal happened history last lost ended
next no now observation one only outcome previous reply result steps step success succeeded then turn turns was won yes
"""
MARKS = (".", ",", ":", '"', "'", "(", ")", "-", ">", "[", "]", "/", "=", "?", "!", "-=", "=-", "):", ">:", "].", "...")
LINE_BREAKS = ("\n", "\n\n")


MAX_WORDS = 1024


def build_tokenizer(vocabulary: Sequence[str] = (), texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are bytes, words of an environment and of prompts, and frequent pieces of ``texts``.

    Args:
        vocabulary: words that become tokens, with and without a leading space.
        texts: texts whose most frequent pieces become tokens, too, at most :data:`MAX_WORDS` (ties in alphabetical order).

    Returns:
        A fast tokenizer with a chat template that writes turns as ``<|user|>…<|assistant|>…<|end|>``; ``<|end|>`` is its
        end-of-sequence token. Encoding adds no special tokens.
    """
    pieces = dict.fromkeys(_known_pieces(vocabulary))
    counts = Counter(piece for text in texts for piece in re.findall(PIECE, text) if piece not in pieces)
    pieces.update(dict.fromkeys(sorted(counts, key=lambda piece: (-counts[piece], piece))[:MAX_WORDS]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    for piece in pieces:
        ids.setdefault(_spell(piece), len(ids))
    core = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECE), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
    )


def _known_pieces(vocabulary: Sequence[str]) -> Iterator[str]:
    """Yield the pieces that are always tokens, in the order of their ids."""
    yield from LINE_BREAKS
    for word in (*vocabulary, *PROMPT_WORDS.split()):
        yield " " + word
        yield word
    yield from (f" {number}" for number in range(MAX_NUMBER + 1))
    yield from MARKS


def _spell(piece: str) -> str:
    """Write a piece in the byte-level alphabet (one visible character per UTF-8 byte)."""
    return "".join(token for token, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece))
