"""A tiny random model in the Hugging Face format."""

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory):
    """Folder of a random two-layer Qwen3 with tied embeddings and two stop tokens, whose tokenizer writes id 5 as ``<5>``.

    Its generation settings must not change the sampling of an engine.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
        eos_token_id=7, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    # Only the generation settings name the second stop token, as those of chat models do with the end-of-turn token.
    model.generation_config = GenerationConfig(
        eos_token_id=[7, 8], pad_token_id=0, do_sample=True, temperature=0.1, top_k=1, top_p=0.5, repetition_penalty=2.0
    )
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(300)}, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tiny_qwen3):
    """The model of that folder; tests must not change it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_qwen3)
