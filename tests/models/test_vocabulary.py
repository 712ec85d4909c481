"""How a model ends and how many token ids it has: the same answer for a folder and for a live model, for whole and composite
configurations."""

from types import SimpleNamespace

import pytest
import transformers
from transformers import GenerationConfig

from trial_ray.models.model_shape import stop_token_ids, stop_tokens_of, vocabulary_size


@pytest.mark.parametrize("name", ["Gemma3Config", "Qwen3_5Config"])
def test_the_text_part_of_a_composite_configuration_is_asked(name, tmp_path):
    config = getattr(transformers, name)()
    config.get_text_config().vocab_size = 321
    config.eos_token_id, config.get_text_config().eos_token_id = None, [5, 6]
    assert vocabulary_size(config) == 321
    assert stop_tokens_of(config, None, None) == [5, 6]
    config.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[7, 6]).save_pretrained(tmp_path)
    assert stop_token_ids(str(tmp_path)) == [5, 6, 7]
    config.eos_token_id = 9  # what the whole says goes before the part's, which may be a default of its class
    assert stop_tokens_of(config, SimpleNamespace(eos_token_id=[9, 11]), SimpleNamespace(eos_token_id=2)) == [2, 9, 11]
