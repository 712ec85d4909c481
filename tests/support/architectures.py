"""Small random models of transformers' architectures, one or two for each way in which they differ from Llama.

A model has a few thousand parameters, and every weight, bias and stored buffer is random, so that a forgotten one shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 96

_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL = {
    **_IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_GPT = {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    "head_dim": 8,
}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "llama-dynamic-rope": (
        "llama",
        _SMALL | {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        },
    ),
    "llama4": (
        "llama4_text",
        _SMALL | _LOCAL_EXPERTS | {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48, "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 4,
            "floor_scale": 4,
        },
    ),
    "mistral": ("mistral", _SMALL | {"sliding_window": 4}),
    "mixtral": ("mixtral", _SMALL | _LOCAL_EXPERTS | {"sliding_window": None, "router_jitter_noise": 0.1}),
    "qwen2": ("qwen2", _SMALL | {"attention_dropout": 0.1}),
    "qwen3": ("qwen3", _SMALL),
    "qwen3-moe": ("qwen3_moe", _SMALL | _EXPERTS),
    "qwen3-next": ("qwen3_next", _SMALL | _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 16}),
    "qwen3.5": ("qwen3_5_text", _SMALL | _DELTA),
    "gemma2": (
        "gemma2",
        _SMALL | _WINDOWS | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("gemma3_text", _SMALL | _WINDOWS | {"query_pre_attn_scalar": 8}),
    "gemma4": ("gemma4_text", _SMALL | _WINDOWS | {
        "global_head_dim": 16, "final_logit_softcapping": 2.0, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    }),
    "gpt-oss": ("gpt_oss", _SMALL | _WINDOWS | _LOCAL_EXPERTS | _PLAIN_ROPE),
    "gpt2": ("gpt2", _GPT | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}),
    "gpt-j": ("gptj", _GPT | {"rotary_dim": 4}),
    "codegen": ("codegen", _GPT | {"rotary_dim": 4}),
    "bloom": ("bloom", _IDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon-alibi": ("falcon", _IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
    "falcon-h1": ("falcon_h1", _SMALL | _MAMBA2 | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "phi3": ("phi3", _SMALL),
    "phi3-longrope": (
        "phi3",
        _SMALL | {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            },
        },
    ),
    "granite": ("granite", _SMALL | {"logits_scaling": 4.0}),
    "cohere2": ("cohere2", _SMALL | _WINDOWS | {"logit_scale": 0.25}),
    "glm4-moe": ("glm4_moe", _SMALL | _ROUTED_EXPERTS),
    "deepseek-v3": ("deepseek_v3", _SMALL | _ROUTED_EXPERTS | _LATENT),
    "minimax-m2": ("minimax_m2", _SMALL | _LOCAL_EXPERTS),
    "lfm2-moe": (
        "lfm2_moe",
        _SMALL | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "smollm3": ("smollm3", _SMALL),
    "apertus": ("apertus", _SMALL | _PLAIN_ROPE),
    "recurrentgemma": ("recurrent_gemma", _SMALL | {
        "block_types": ["recurrent", "attention"], "attention_window_size": 4, "lru_width": 32, "logits_soft_cap": 2.0,
    }),
    "mamba": ("mamba", _IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}),
    "rwkv": ("rwkv", _IDS | {
        "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "context_length": 128,
    }),
}  # fmt: skip
"""Type and settings of the config, by the name in test ids."""


def config_of(name: str) -> PretrainedConfig:
    """A new config of an architecture of the table."""
    model_type, settings = ARCHITECTURES[name]
    return AutoConfig.for_model(model_type, **settings)


def random_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A model of the table as transformers makes it; ``settings`` go to ``from_config``."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype, **settings).eval()
    randomise(lm, seed)
    return lm


@torch.no_grad()
def randomise(lm: PreTrainedModel, seed: int = 0) -> None:
    """Give all parameters, and the learned buffers that are stored with them, values that matter."""
    generator = torch.Generator().manual_seed(seed)
    unstored = {id(buffer) for _, buffer in lm.named_non_persistent_buffers()}
    # Buffers of more dimensions and of none are computed from the config.
    buffers = [each for each in lm.buffers() if id(each) not in unstored and each.ndim == 1]
    for tensor in [*lm.parameters(), *buffers]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            # Vectors keep what they are centred on: scales of norms, decay rates.
            tensor.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor + 0.3 * noise)


def save_model(name: str, folder: Path, seed: int = 0) -> str:
    """Write the float32 model to a folder as transformers does; returns the folder."""
    random_model(name, seed=seed).save_pretrained(folder)
    return str(folder)
