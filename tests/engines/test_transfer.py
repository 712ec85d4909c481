"""Weight transfer: choice of the backend, merging of the learners' weights, and what vLLM's receiving side gets."""

from types import SimpleNamespace

import pytest
import torch
from fake_engines import digests
from rejections import misconfigured
from small_learners import config_of

from trial_ray.engines.transfer import ObjectStoreSender, merge_weights, weight_sender
from trial_ray.engines.weights import Weights
from trial_ray.errors import EngineError, WeightSyncError

SHARED = {"engine": "vllm", "num_gpus_per_engine": 0.5, "colocate": True}
SEPARATE = {"engine": "vllm", "num_gpus_per_engine": 1}
LEARNER = {"num_learners": 1, "num_gpus_per_learner": 1}
HALF = {"num_gpus_per_learner": 0.5}


def config(engines, learners):
    return config_of("trial", "anything").engines(**engines).learners(**learners)


def test_the_backend_follows_from_the_devices():
    for engines, learners, backend in (
        ({}, {}, "object_store"),
        (SHARED, HALF, "ipc"),
        ({"engine": "transformers", "colocate": True}, {}, "object_store"),
        (SEPARATE, LEARNER, "object_store"),
        ({**SEPARATE, "weight_transfer": "nccl"}, LEARNER, "nccl"),
    ):
        made = config(engines, learners)
        made.validate()
        assert made.transfer_backend() == backend


@pytest.mark.parametrize(
    ("engines", "learners", "message"),
    [
        ({"colocate": True}, {}, "able to sleep"),
        ({**SHARED, "num_engines": 2}, HALF, "num_engines=2 and 1 learners"),
        (SHARED, {}, "num_gpus_per_learner=0"),
        ({**SHARED, "engine_kwargs": {"tensor_parallel_size": 2}}, HALF, "tensor_parallel_size"),
        ({"weight_transfer": "rdma"}, {}, "rdma"),
        ({"weight_transfer": "ipc"}, {}, "engine='vllm'"),
        ({**SHARED, "weight_transfer": "ipc", "colocate": False}, {}, "set colocate"),
        ({**SHARED, "weight_transfer": "nccl"}, HALF, "leave out colocate"),
        ({**SHARED, "weight_transfer": "nccl", "colocate": False}, {"num_learners": 1}, "in processes"),
    ],
)
def test_impossible_sharing_of_devices_is_rejected(engines, learners, message):
    misconfigured(message, config(engines, learners).validate)


def test_gpu_backends_are_rejected_without_a_gpu():
    for backend in ("ipc", "nccl"):
        misconfigured(None, weight_sender, backend, rank=0, workers_per_engine=1)


def test_all_learners_gather_and_the_first_fills_the_object_store():
    gathered = []
    assert ObjectStoreSender(rank=1).prepare(lambda: map(gathered.append, range(3)), 1, ()) is None
    assert gathered == [0, 1, 2]


def prepared(gpu, checksum="c", arrangement="a", backend="ipc"):
    update = {"names": ["a", "b"], "ipc_handles": [{gpu: (gpu, name)} for name in "ab"]}
    return Weights(3, checksum, arrangement, backend=backend, update=update)


def test_merged_weights_have_the_handles_of_all_learners_that_agree():
    merged = merge_weights([prepared("gpu0"), prepared("gpu1")])
    assert merged.update["ipc_handles"] == [{gpu: (gpu, name) for gpu in ("gpu0", "gpu1")} for name in "ab"]
    assert (merged.version, merged.checksum, merged.update["names"]) == (3, "c", ["a", "b"])
    assert merge_weights([prepared("gpu0", backend="nccl"), None]) == prepared("gpu0", backend="nccl")
    for difference in ({"checksum": "d"}, {"arrangement": "d"}):
        with pytest.raises(WeightSyncError):
            merge_weights([prepared("gpu0"), prepared("gpu1", **difference)])


WEIGHTS = {"a": torch.arange(24.0).reshape(4, 6).bfloat16().t(), "b": torch.arange(3.0), "n": torch.arange(2)}
SHAPES = [[6, 4], [3], [2]]


@pytest.fixture
def on_cuda(monkeypatch):
    """Replace the parts of CUDA that the senders use."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="gpu7"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.ipc_collect", lambda: None)
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (None, (tensor.data_ptr(),)))


@pytest.mark.vllm
def test_ipc_weights_fit_vllm_and_keep_their_copies_until_released(on_cuda):
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    sender = weight_sender("ipc", rank=1, workers_per_engine=1)
    weights = sender.prepare(WEIGHTS.items, 4, ())
    assert (weights.checksum, weights.arrangement) == digests(WEIGHTS.items())
    update = IPCWeightTransferUpdateInfo(**weights.update)
    assert (update.names, update.shapes) == ([*WEIGHTS], SHAPES)
    assert update.dtype_names == ["bfloat16", "float32", "int64"]
    assert all(copy.is_contiguous() for copy in sender._copies)
    assert update.ipc_handles == [{"gpu7": (copy.data_ptr(),)} for copy in sender._copies]
    sender.release()
    assert sender._copies == []


@pytest.mark.vllm
def test_an_nccl_group_is_formed_again_for_other_engines(on_cuda, monkeypatch):
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    calls, joined = [], []

    class Group(SimpleNamespace):
        def shutdown(self):
            calls.append("shutdown")

        def send_weights(self):
            assert [meta.name for meta in self.source.metadata()] == [name for name, _ in self.source]
            calls.append("send")

    def trainer_init(info, *, client, source):
        client.init_weight_transfer_engine({"world_size": info.world_size, "rank_offset": 1})
        return Group()

    def engine(name):
        def join(backend, info):
            joined.append((name, backend, info["rank_offset"], info["world_size"]))
            if name == "unreachable":
                raise EngineError(name)

        return SimpleNamespace(join_transfer=SimpleNamespace(remote=join))

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr("ray.get", lambda refs, timeout: refs)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    sender = weight_sender("nccl", rank=0, workers_per_engine=2)
    a, b, c, lost = map(engine, ("a", "b", "c", "unreachable"))
    for _ in range(2):
        weights = sender.prepare(WEIGHTS.items, 4, [a, b])
        sender.send()
        sender.release()
    assert NCCLWeightTransferUpdateInfo(**weights.update).shapes == SHAPES
    assert joined == [("a", "nccl", 1, 5), ("b", "nccl", 3, 5)]
    assert calls == ["send", "send"]
    sender.prepare(WEIGHTS.items, 5, [a, c])
    assert calls[2:] == ["shutdown"]
    with pytest.raises(EngineError):
        sender.prepare(WEIGHTS.items, 6, [a, lost])
    sender.prepare(WEIGHTS.items, 6, [a, c])
    assert [name for name, *_ in joined][2:] == ["a", "c", "a", "unreachable", "a", "c"]
