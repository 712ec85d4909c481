"""Weight loading in vLLM's worker: checksums of received and of loaded tensors, and interrupted updates."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from fake_engines import digests
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


def make_worker(workers=1):
    """vLLM's own worker with the extension around a small model, as far as weight updates need it."""
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
def tensors():
    torch.manual_seed(1)
    return {name: torch.randn_like(tensor) for name, tensor in Layers().named_parameters()}


@pytest.fixture
def load(tmp_path):
    """Function that sends each of some dicts of tensors to a worker as one file, and ends the update."""

    def load(worker, *shards, end=True):
        worker.begin_update("object_store")
        for number, shard in enumerate(shards):
            file = tmp_path / f"{number}.safetensors"
            save_file(shard, file)
            worker.update_weights({"path": str(file)})
        return worker.end_update() if end else None

    return load


def split(tensors):
    return [{name: tensors[name] for name in tensors if name.startswith(layer)} for layer in ("first", "second")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_version_is_summed_once_as_received_and_once_as_loaded(tensors, load, monkeypatch, workers):
    sizes, add = [], WeightsChecksum.add

    def recorded(self, name, tensor):
        sizes.append(tensor.numel())
        add(self, name, tensor)

    monkeypatch.setattr(WeightsChecksum, "add", recorded)
    worker = make_worker(workers)
    loaded = load(worker, *split(tensors))
    assert sum(sizes) == sum(tensor.numel() for tensor in tensors.values()) * (2 if workers == 1 else 1)
    assert loaded == digests(tensors.items())
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in worker.model.named_parameters())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_of_a_version_is_detected(tensors, load, workers):
    worker = make_worker(workers)
    load(worker, tensors)
    first, _ = split(tensors)
    summed = tensors if workers == 1 else first  # One of several workers sums what it received.
    assert load(worker, first) == (digests(summed.items())[0], digests(first.items())[1])


@pytest.mark.parametrize("workers", [1, 2])
def test_elements_that_changed_places_are_detected(tensors, load, workers):
    flipped = {**tensors, "first.weight": tensors["first.weight"].flip(0)}
    checksum, arrangement = load(make_worker(workers), flipped)
    assert checksum == digests(tensors.items())[0]
    assert arrangement != digests(tensors.items())[1]


@pytest.mark.parametrize(
    ("shard", "error"),
    [
        ({"first.weight": torch.zeros(6, 8)}, contextlib.nullcontext()),
        ({"unknown": torch.zeros(1)}, pytest.raises(KeyError)),
    ],
    ids=["incomplete", "failed"],
)
def test_an_interrupted_update_leaves_nothing_behind(tensors, load, shard, error):
    worker = make_worker()
    with error:
        load(worker, shard, end=False)
    assert load(worker, *split(tensors)) == digests(tensors.items())
