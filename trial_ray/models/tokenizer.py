"""The tiny model's tokenizer: bytes, plus every word of the environments' texts as one token of its own.

A model of under a million parameters learns to act by copying names out of its prompt, and copies whole words long
before it copies pieces of them. The vocabulary is therefore a byte-level BPE without merges: a piece of text (a word, a
number or a mark, with the blank before it) is one token when it is known, and its UTF-8 bytes otherwise, so that any
text round-trips. Ids follow from sorted word lists alone, hence are the same on every machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PIECE = r" ?[A-Za-z]+| ?[0-9]+|\n+| ?[^\sA-Za-z0-9]+|\s"
"""What may become one token: a word, a number or a run of marks, each with a blank before it, line breaks, a blank."""

LARGEST_NUMBER = 40
"""Objects are numbered per type ("drawer 12"); numbers up to this one are whole tokens."""

PROMPT_WORDS = """
Action Actions Admissible After Before Choose History Last No Now Observation Outcome Reply Result Step Task The This
action actions admissible after answer before command done episode failed game goal happened history last lost ended
next no now observation one only outcome previous reply result steps step success succeeded then turn turns was won yes
"""
MARKS = (".", ",", ":", '"', "'", "(", ")", "-", ">", "[", "]", "/", "=", "?", "!", "-=", "=-", "):", ">:", "].", "...")
LINE_BREAKS = ("\n", "\n\n")


def build_tokenizer(
    vocabulary: Sequence[str] = (), texts: Iterable[str] = (), most_words: int = 1024
) -> PreTrainedTokenizerFast:
    """Build the tokenizer: bytes, the words of an environment and of prompts, and the pieces that are frequent in ``texts``.

    Args:
        vocabulary: words that become tokens, with and without a blank before them.
        texts: text whose frequent pieces become tokens too.
        most_words: at most so many pieces are taken from ``texts`` (most frequent first, ties in alphabetical order).

    Returns:
        A fast tokenizer with a chat template whose turns are ``<|user|>…<|assistant|>…<|end|>``; ``<|end|>`` is its
        end-of-sequence token. Encoding adds no special tokens of its own.
    """
    pieces = dict.fromkeys(_known_pieces(vocabulary))
    counts = Counter(piece for text in texts for piece in re.findall(PIECE, text) if piece not in pieces)
    pieces.update(dict.fromkeys(sorted(counts, key=lambda piece: (-counts[piece], piece))[:most_words]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    for piece in pieces:
        ids.setdefault(_spell(piece), len(ids))
    return _wrap(ids)


def _known_pieces(vocabulary: Sequence[str]) -> Iterator[str]:
    """Pieces that are tokens whatever the texts hold, in the order of their ids."""
    yield from LINE_BREAKS
    for word in (*vocabulary, *PROMPT_WORDS.split()):
        yield " " + word
        yield word
    yield from (f" {number}" for number in range(LARGEST_NUMBER + 1))
    yield from MARKS


def _spell(piece: str) -> str:
    """Write a piece in the byte-level alphabet (one visible character per UTF-8 byte)."""
    return "".join(token for token, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(piece))


def _wrap(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
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
        model_max_length=2048,
    )
