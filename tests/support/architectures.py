"""Small random models of transformers' architectures, one or two for each way in which they differ from Llama.

A model has a few thousand parameters, and every weight, bias and stored buffer is random, so that a forgotten one shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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

ARCHITECTURES = {
    "llama": _SMALL,
    "llama-dynamic-rope": _SMALL | {
        "max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    },
    "llama4": _SMALL | _LOCAL_EXPERTS | {
        "num_hidden_layers": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4, "floor_scale": 4,
    },
    "mistral": _SMALL | {"sliding_window": 4},
    "mixtral": _SMALL | _LOCAL_EXPERTS | {"sliding_window": None, "router_jitter_noise": 0.1},
    "qwen2": _SMALL | {"attention_dropout": 0.1},
    "qwen3": _SMALL,
    "qwen3-moe": _SMALL | _EXPERTS,
    "qwen3-next": _SMALL | _EXPERTS | _DELTA | {"shared_expert_intermediate_size": 16},
    "qwen3.5": _SMALL | _DELTA,
    "gemma2": _SMALL | _WINDOWS | {
        "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8,
    },
    "gemma4": _SMALL | _WINDOWS | {
        "global_head_dim": 16, "final_logit_softcapping": 2.0, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    },
    "gpt-oss": _SMALL | _WINDOWS | _LOCAL_EXPERTS | _PLAIN_ROPE,
    "gpt2": _GPT | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "gpt-j": _GPT | {"rotary_dim": 4},
    "codegen": _GPT | {"rotary_dim": 4},
    "bloom": _IDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon-alibi": _IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "falcon-h1": _SMALL | _MAMBA2 | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "phi3": _SMALL,
    "phi3-longrope": _SMALL | {
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    },
    "granite": _SMALL | {"logits_scaling": 4.0},
    "cohere2": _SMALL | _WINDOWS | {"logit_scale": 0.25},
    "glm4-moe": _SMALL | _ROUTED_EXPERTS,
    "deepseek-v3": _SMALL | _ROUTED_EXPERTS | _LATENT,
    "minimax-m2": _SMALL | _LOCAL_EXPERTS,
    "lfm2-moe": _SMALL | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "smollm3": _SMALL,
    "apertus": _SMALL | _PLAIN_ROPE,
    "recurrentgemma": _SMALL | {
        "block_types": ["recurrent", "attention"], "attention_window_size": 4, "lru_width": 32, "logits_soft_cap": 2.0,
    },
    "mamba": _IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    "rwkv": _IDS | {
        "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "context_length": 128,
    },
}  # fmt: skip
"""Settings of the config, by the name in test ids."""
TYPES = {
    "llama-dynamic-rope": "llama", "llama4": "llama4_text", "qwen3.5": "qwen3_5_text", "gemma4": "gemma4_text", "gpt-j": "gptj",
    "falcon-alibi": "falcon", "phi3-longrope": "phi3", "recurrentgemma": "recurrent_gemma",
}  # fmt: skip
"""Types of models whose type is not that name with underscores."""


def config_of(name):
    """A new config of an architecture of the table."""
    return AutoConfig.for_model(TYPES.get(name, name.replace("-", "_")), **ARCHITECTURES[name])


def random_model(name, dtype=torch.float32):
    """A model of the table as transformers makes it."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype).eval()
    randomise(lm)
    return lm


@torch.no_grad()
def randomise(lm, seed=0):
    """Give all parameters, and the learned buffers that are stored with them, values that matter."""
    generator = torch.Generator().manual_seed(seed)
    unstored = {id(buffer) for _, buffer in lm.named_non_persistent_buffers()}
    # Buffers of more dimensions and of none are computed from the config.
    buffers = [each for each in lm.buffers() if id(each) not in unstored and each.ndim == 1]
    for tensor in [*lm.parameters(), *buffers]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            # Vectors keep what they are centred on: scales of norms, decay rates.
            tensor.copy_(noise / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor + 0.3 * noise)


def save_model(name, folder):
    """Write the float32 model to a folder as transformers does; returns the folder."""
    random_model(name).save_pretrained(folder)
    return str(folder)
