"""How many rows an engine decodes at a time where nobody says: as many as memory holds, up to where more gain nothing."""

from __future__ import annotations

from typing import Any

import torch

from trial_ray.errors import EngineError
from trial_ray.inference.decoding_cache import SLACK
from trial_ray.process_memory import available_memory

MOST_ROWS = 256
"""A batch so large keeps any device busy; more rows make each response slower and no more of them."""
MEMORY_SHARE = 0.5
"""Of the memory that is free once the model is loaded; prefill and sampling take from the rest."""


def rows_that_fit(config: Any, max_model_len: int, dtype: torch.dtype, free_bytes: int) -> int:
    """Rows of full length whose keys and values take :data:`MEMORY_SHARE` of the memory, :data:`MOST_ROWS` at most.

    Args:
        config: the model's, as transformers has it.
        max_model_len: most tokens in a row.
        dtype: of keys and values.
        free_bytes: memory that is free.

    Raises:
        EngineError: not even one row fits.
    """
    row_bytes = int(max_model_len * token_bytes(config, dtype) * (1 + 2 / SLACK))
    rows = int(free_bytes * MEMORY_SHARE) // row_bytes
    if rows < 1:
        raise EngineError(
            f"max_model_len: {max_model_len} found, of which one row takes {row_bytes / 2**20:.0f} MiB; {MEMORY_SHARE:.0%} of "
            f"the free memory, {free_bytes / 2**20:.0f} MiB, expected to hold it. Lower max_prompt_tokens or "
            "max_response_tokens, free memory, or set max_batch=1 to try all the same"
        )
    return min(rows, MOST_ROWS)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token over all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device, or on this machine.

    Raises:
        EngineError: the system does not tell.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_memory()
    if available is None:
        raise EngineError(
            "This system does not tell how much memory is free, from which max_batch follows; set max_batch."
        )
    return available
