"""The part of the vLLM engine inside vLLM's worker: every tensor is summed as it is received and, alone, as it is held."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from fake_engines import sums
from safetensors.torch import save_file

from trial_ray.engines.weights import WeightsChecksum

pytestmark = pytest.mark.vllm


class Layers(torch.nn.Module):
    """Two layers that load like vLLM's own: through the ``weight_loader`` of each parameter."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 6)
        self.second = torch.nn.Linear(6, 4)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)


def make_worker(workers):
    """vLLM's own worker around a small model, with the extension mixed in, as far as an update of the weights needs it."""
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker as VLLMWorker

    from trial_ray.engines.vllm_worker import WeightLoadingExtension

    class Worker(VLLMWorker, WeightLoadingExtension):
        def __init__(self):
            self.model = Layers()
            record_metadata_for_reloading(self.model)
            self.model_runner = SimpleNamespace(get_model=lambda: self.model, reset_lora_state=lambda: None)
            self.vllm_config = VllmConfig()
            self.vllm_config.model_config = SimpleNamespace(dtype=torch.float32)
            self.parallel_config = SimpleNamespace(tensor_parallel_size=workers)
            self.device = torch.device("cpu")
            self._weight_update_active = self._weight_update_is_draft = False

    return Worker()


@pytest.fixture
def sent(tmp_path):
    """A new version in two files, and its tensors."""
    torch.manual_seed(1)
    tensors = {name: torch.randn_like(tensor) for name, tensor in Layers().named_parameters()}
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, layer in zip(files, ("first", "second"), strict=True):
        save_file({name: tensor for name, tensor in tensors.items() if name.startswith(layer)}, file)
    return files, tensors


@pytest.fixture
def summed(monkeypatch):
    """Elements of every tensor that goes into a checksum."""
    sizes = []
    add = WeightsChecksum.add

    def noted(self, name, tensor):
        sizes.append(tensor.numel())
        add(self, name, tensor)

    monkeypatch.setattr(WeightsChecksum, "add", noted)
    return sizes


def load(worker, files):
    worker.begin_update("object_store")
    for file in files:
        worker.update_weights({"path": str(file)})
    return worker.end_update()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_version_is_summed_once_as_received_and_once_as_held_where_that_is_whole(sent, summed, workers):
    files, tensors = sent
    worker = make_worker(workers)
    found = load(worker, files)
    assert sum(summed) == sum(tensor.numel() for tensor in tensors.values()) * (2 if workers == 1 else 1)
    assert found == sums(tensors.items())
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in worker.model.named_parameters())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_answers_for_what_it_holds_or_one_of_several_for_what_it_received(sent, workers):
    files, tensors = sent
    worker = make_worker(workers)
    load(worker, files)
    first = [(name, tensor) for name, tensor in tensors.items() if name.startswith("first")]
    held = tensors.items() if workers == 1 else first  # the second layer is still held
    assert load(worker, files[:1]) == (sums(held)[0], sums(first)[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_tensors_whose_elements_changed_places_on_the_way_are_seen(sent, tmp_path, workers):
    _, tensors = sent
    save_file({**tensors, "first.weight": tensors["first.weight"].flip(0)}, tmp_path / "flipped.safetensors")
    checksum, arrangement = load(make_worker(workers), [tmp_path / "flipped.safetensors"])
    assert checksum == sums(tensors.items())[0]
    assert arrangement != sums(tensors.items())[1]


@pytest.mark.parametrize("cut", ["within a layer", "by an error of the model"])
def test_a_cut_update_leaves_nothing_behind_that_the_next_one_could_mix_in(sent, tmp_path, cut):
    files, tensors = sent
    worker = make_worker(1)
    stale = tmp_path / "stale.safetensors"
    save_file({"first.weight": torch.zeros(6, 8)} if cut == "within a layer" else {"unknown": torch.zeros(1)}, stale)
    worker.begin_update("object_store")
    with pytest.raises(KeyError) if cut == "by an error of the model" else contextlib.nullcontext():
        worker.update_weights({"path": str(stale)})
    assert load(worker, files) == sums(tensors.items())
