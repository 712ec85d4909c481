"""Shape of a causal language model, read without its weights, for estimates of memory and arithmetic.

The module also has functions for token ids: the vocabulary's size, stop tokens, special tokens, and a text for unknown ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError
from trial_ray.models.folders import model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def vocabulary_size(config: PretrainedConfig) -> int:
    """Return the number of rows of a model's output head, including padding, from the model's configuration."""
    return int(config.get_text_config().vocab_size)


def stop_token_ids(model_path: str) -> list[int]:
    """Collect the stop tokens of a model folder, in ascending order; see :func:`stop_tokens_of`.

    Raises:
        ConfigError: ``model_path`` is not a folder; a model on the hub must be fetched first.
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
    tokenizer; a response ends at either. The config of a model for text and images may name these tokens only in its text part.

    Args:
        config: configuration of the model.
        generation_config: object with ``eos_token_id``, or ``None``.
        tokenizer: tokenizer with ``eos_token_id``, or ``None``.
    """
    # Prefer the ids of the whole configuration, because the ids of its text part may be defaults of the part's class.
    model = config if getattr(config, "eos_token_id", None) is not None else config.get_text_config()
    stop_ids: set[int] = set()
    for source in (model, generation_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        stop_ids |= set(ids) if isinstance(ids, (list, tuple)) else set() if ids is None else {ids}
    return sorted(stop_ids)


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens; ``tokenizer.all_special_ids`` has only those with a role, such as ``eos_token``."""
    added = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def spell_unknown(token_id: int) -> str:
    """Return a text for a token id that the tokenizer does not have.

    A model's head may have more rows than its tokenizer has tokens (Qwen's has 151,936 rows for 151,669 tokens). The ids of the
    other rows would decode to an empty text, and an action with such an id would look like another action.
    """
    return f"⟨id {token_id}⟩"


_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {
        **_QWEN,
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen/Qwen2.5-3B": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}
"""Shapes of the models in ``tuned_examples``, for machines without network."""
PUBLISHED["Qwen/Qwen2.5-3B-Instruct"] = PUBLISHED["Qwen/Qwen2.5-3B"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention and a gated feed-forward network.

    Attributes:
        parameters: number of parameters, tied parameters counted once.
        embedding_parameters: number of parameters of the input embedding.
        tied: whether the output head is the input embedding.
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward network.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocabulary: rows of the output head.
        qk_norm: whether queries and keys are normalised.
    """

    parameters: int
    embedding_parameters: int
    tied: bool
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: bool = False

    @property
    def matmul_parameters(self) -> int:
        """Number of parameters in the matrix products of each token: all but those of a separate input embedding."""
        return self.parameters - (0 if self.tied else self.embedding_parameters)

    @property
    def kv_elements_per_token(self) -> int:
        """Number of elements per token in a key-value cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> ModelShape:
        """Return the shape of the model that a transformers configuration describes; parameters are counted, not estimated."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight
        text = config.get_text_config()
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            embedding_parameters=embedding.numel(),
            tied=head is embedding,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=vocabulary_size(config),
            qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        )


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the maximum number of tokens that the model has positions for; ``None`` if its architecture sets no limit.

    The number is ``max_position_embeddings``, times the factor of a linear or dynamic scaling of rotary embeddings. With other
    kinds of scaling, ``max_position_embeddings`` already includes the factor.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        return None
    rotary = getattr(text, "rope_parameters", None) or {}
    # The rotary settings are either for all layers, or separate for each kind of layer.
    kinds = [rotary] if "rope_type" in rotary else [kind for kind in rotary.values() if isinstance(kind, dict)]
    factors = [kind.get("factor") or 1.0 for kind in kinds if kind.get("rope_type") in ("linear", "dynamic")]
    return int(positions * max(factors, default=1.0))


@cache
def model_shape(model_path: str) -> ModelShape:
    """Return the shape of the model in a folder, of a model in :data:`PUBLISHED`, or of another model on the hub.

    Raises:
        ConfigError: the shape of the model is unknown.
    """
    import transformers

    if model_path in PUBLISHED and not Path(model_path).is_dir():
        return ModelShape.of_config(transformers.AutoConfig.for_model(**PUBLISHED[model_path]))
    folder = model_folder(model_path, weights=False)
    try:
        return ModelShape.of_config(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_path: {folder} is not a causal language model: {error}") from error
