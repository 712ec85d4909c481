"""Token ids of a model: vocabulary size, tokens that end a response, text of unknown tokens. All modules use these functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def vocabulary_size(config: PretrainedConfig) -> int:
    """Rows of the output head of the model that a transformers configuration describes, including padding."""
    return int(config.get_text_config().vocab_size)


def stop_token_ids(model_path: str) -> list[int]:
    """Collect the stop tokens of a model folder, in ascending order; see :func:`stop_tokens_of`.

    Raises:
        ConfigError: ``model_path`` is not a folder; files that do not exist and files that were not fetched would then look
            alike.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"model_path: expected a model folder, got {model_path!r}; fetch the model first.")
    generation = (folder / "generation_config.json").exists()
    tokenizer = (folder / "tokenizer_config.json").exists()
    return stop_tokens_of(
        AutoConfig.from_pretrained(folder, trust_remote_code=False),
        GenerationConfig.from_pretrained(model_path) if generation else None,
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False) if tokenizer else None,
    )


def stop_tokens_of(config: PretrainedConfig, generation_config: Any, tokenizer: Any) -> list[int]:
    """Collect the stop tokens of a model's configuration, generation settings and tokenizer, in ascending order.

    A chat model often names its end-of-turn token only in its generation settings and its end-of-text token only in its
    tokenizer; a response ends at either. Configurations of several parts may name them only in the text part.

    Args:
        config: configuration of the model.
        generation_config: object with ``eos_token_id``, or ``None``.
        tokenizer: tokenizer with ``eos_token_id``, or ``None``.
    """
    # Prefer the ids of the whole configuration: those of the text part may be defaults of its class.
    model = config if getattr(config, "eos_token_id", None) is not None else config.get_text_config()
    stop_ids: set[int] = set()
    for source in (model, generation_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        stop_ids |= set(ids) if isinstance(ids, (list, tuple)) else set() if ids is None else {ids}
    return sorted(stop_ids)


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens; ``all_special_ids`` of transformers has only those with a role, as ``eos_token``."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def spell_unknown(token_id: int) -> str:
    """Return the text for a token id that the tokenizer does not have.

    A model's head may be padded beyond its tokenizer (Qwen's has 151,936 rows for 151,669 tokens). Such an id would decode to an
    empty text, and an action with such an id would look like another action.
    """
    return f"⟨id {token_id}⟩"
