"""Load causal language models and tokenizers from Hugging Face folders, with transformers or tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trial_ray.errors import ConfigError, first_line
from trial_ray.models.folders import load_tensors, model_folder, tensor_headers
from trial_ray.models.layout import measured_layout, set_layout
from trial_ray.models.sharding import copy_whole
from trial_ray.models.tensors import kept_in_float32, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(model_path: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, or of a name on the model hub.

    Args:
        model_path: the folder or name.

    Raises:
        ConfigError: there is no tokenizer at ``model_path``.
    """
    # Import here, because transformers' models take three seconds to import.
    from transformers import AutoTokenizer

    model_path = str(model_path)
    # Fetch the folder first: without a network, transformers would try each file six times, with a message each time.
    folder = model_path if Path(model_path).is_dir() else model_folder(model_path)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"No tokenizer could be loaded from {model_path!r}: {first_line(error)}.") from error


def load_causal_lm(model_path: str, dtype: str, *, weights: bool = True) -> PreTrainedModel:
    """Load a causal LM from a folder or a hub name, in evaluation mode and without dropout.

    Args:
        model_path: the folder or name.
        dtype: dtype of the weights, such as ``"bfloat16"``.
        weights: whether to load the weights. If not, they are on torch's ``meta`` device until :func:`fill` loads them.

    Raises:
        ConfigError: there is no causal LM at ``model_path``, or its weights are quantised.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = model_folder(model_path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise ConfigError(
                f"The weights in {model_path!r} are quantised, so they cannot be trained. Use the model's unquantised weights."
            )
        layout = measured_layout(config)
        settings = {"dtype": getattr(torch, dtype), "attn_implementation": layout.attention, "trust_remote_code": False}
        lm: PreTrainedModel
        if weights:
            lm = AutoModelForCausalLM.from_pretrained(folder, **settings)
        else:
            with torch.device("meta"):
                lm = AutoModelForCausalLM.from_config(config, **settings).eval()
            kept = kept_in_float32(lm)
            for name, buffer in lm.named_buffers():
                # Convert the buffers of kept_in_float32() to float32, as from_pretrained() does.
                if name in kept and lm.dtype in (torch.bfloat16, torch.float16):
                    buffer.data = buffer.data.float()
            if (Path(folder) / "generation_config.json").is_file():
                lm.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:  # A KeyError means an unknown attention implementation.
        raise ConfigError(f"No causal LM could be loaded from {model_path!r}: {first_line(error)}.") from error
    _switch_off_dropout(lm)
    set_layout(lm, layout)
    return lm


_MARK = "_is_hf_initialized"
"""Name of the attribute that marks the tensors that transformers' ``initialize_weights`` must leave unchanged."""


@torch.no_grad()
def fill(lm: PreTrainedModel, model_path: str, device: torch.device) -> None:
    """Allocate a model that was loaded without weights, whole or sharded, on the device, and load its weights.

    Host memory contains one tensor at a time, or all tensors if the names in the folder's files differ from the model's names
    (transformers then converts them).

    Raises:
        ConfigError: the folder does not contain weights of this model.
    """
    lm.to_empty(device=device)
    lm.tie_weights()
    stored = stored_tensors(lm)
    for tensor in stored.values():
        setattr(tensor, _MARK, True)
    lm.initialize_weights()  # Compute the tensors that no file contains, such as rotary frequencies.
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in stored.items() if ".lora_" not in name}
    folder = Path(model_folder(model_path))
    if tensors.keys() <= tensor_headers(folder).keys():
        load_tensors(tensors, folder)
        return
    converted = stored_tensors(load_causal_lm(model_path, str(lm.dtype).removeprefix("torch.")))
    for name, tensor in tensors.items():
        copy_whole(converted[name], tensor)


def _switch_off_dropout(lm: PreTrainedModel) -> None:
    """Disable dropout, because sampling, scoring and training must use the same policy, in training and evaluation mode."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # In some models, attention_dropout is a module.
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # torch declares only tensors and modules
