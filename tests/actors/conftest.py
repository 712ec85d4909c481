"""One small Ray for the whole session, and a tiny random model in the Hugging Face format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

VOCAB_SIZE = 300
STOP_ID = 7


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray with two logical CPUs; actors take fractions of them."""
    import ray

    # Ray's sockets live under this folder, and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        start_ray(folder)
        yield
        ray.shutdown()


def start_ray(folder: str, attempts: int = 3) -> None:
    """Start Ray, again where a busy machine took longer than the 30 s for which Ray waits."""
    import ray

    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                num_cpus=2,
                object_store_memory=150_000_000,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=folder,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out" not in str(error):
                raise


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3 with tied embeddings and no tokenizer; its stop token is ``STOP_ID``."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=STOP_ID,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[STOP_ID], pad_token_id=0)
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    model.save_pretrained(folder)
    return folder
