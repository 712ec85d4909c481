"""Which tokens end a response: one rule for every engine."""

from __future__ import annotations

from pathlib import Path

from trial_ray.errors import ConfigError


def stop_token_ids(model_path: str) -> list[int]:
    """Collect the stop tokens of a model folder: generation config, model config and tokenizer, ascending.

    A chat model often names its end-of-turn token only in ``generation_config.json`` and its end-of-text token only
    in the tokenizer; a response ends at either.

    Raises:
        ConfigError: ``model_path`` is no folder, so that missing files could not be told from files not fetched.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    found: set[int] = set()
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"model_path: {model_path!r} found, a model folder expected; fetch the model first.")
    if (folder / "generation_config.json").exists():
        found |= _as_set(GenerationConfig.from_pretrained(model_path).eos_token_id)
    found |= _as_set(AutoConfig.from_pretrained(model_path).eos_token_id)
    if (folder / "tokenizer_config.json").exists():
        found |= _as_set(AutoTokenizer.from_pretrained(model_path).eos_token_id)
    return sorted(found)


def _as_set(eos: int | list[int] | None) -> set[int]:
    if eos is None:
        return set()
    return set(eos) if isinstance(eos, list) else {eos}
