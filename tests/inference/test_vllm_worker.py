"""The part of the vLLM engine inside vLLM's worker: every tensor is summed once, of what was received or of what is held."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from trial_ray.inference.vllm_worker import WeightLoadingExtension
from trial_ray.inference.weights import WeightsChecksum, weights_checksum

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


class Worker(WeightLoadingExtension):
    """What vLLM's worker class offers to its extension."""

    def __init__(self, workers):
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        self.model = Layers()
        record_metadata_for_reloading(self.model)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=workers)
        self.device = torch.device("cpu")


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
    monkeypatch.setattr(WeightsChecksum, "add", lambda self, tensor: (sizes.append(tensor.numel()), add(self, tensor)))
    return sizes


def load(worker, files):
    worker.begin_weights()
    for file in files:
        worker.load_weights_file(str(file))
    return worker.finish_weights()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_version_is_loaded_and_summed_once(sent, summed, workers):
    files, tensors = sent
    worker = Worker(workers)
    checksum = load(worker, files)
    assert sum(summed) == sum(tensor.numel() for tensor in tensors.values())
    assert checksum == weights_checksum(tensors.items())
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in worker.model.named_parameters())


def test_alone_a_worker_answers_for_what_it_holds(sent):
    files, tensors = sent
    worker = Worker(1)
    load(worker, files)
    with torch.no_grad():
        tensors["first.weight"].mul_(2)
    save_file({name: tensor for name, tensor in tensors.items() if name.startswith("first")}, files[0])
    assert load(worker, files[:1]) == weights_checksum(tensors.items())  # the second layer is still held


def test_one_of_several_workers_answers_for_what_it_received(sent):
    files, tensors = sent
    worker = Worker(2)
    load(worker, files)
    received = [(name, tensor) for name, tensor in tensors.items() if name.startswith("first")]
    assert load(worker, files[:1]) == weights_checksum(received)
