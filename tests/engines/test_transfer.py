"""How weights travel: which backend is taken, what several learners offer together, what vLLM's receiving side is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_engines import sums

from trial_ray.algorithms import TRIALConfig
from trial_ray.engines import transfer as senders
from trial_ray.engines.transfer import ObjectStoreSender, merge_weights, weight_sender
from trial_ray.engines.weights import Weights
from trial_ray.errors import ConfigError, EngineError, WeightSyncError

GPUS = {"engine": "vllm", "num_gpus_per_engine": 0.5}


def config(gpus_per_learner=0.0, num_learners=0, **engines) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path="anything")
        .engines(**engines)
        .learners(num_learners=num_learners, num_gpus_per_learner=gpus_per_learner)
    )


@pytest.mark.parametrize(
    ("engines", "backend"),
    [
        ({}, "object_store"),
        ({**GPUS, "colocate": True}, "ipc"),
        ({"engine": "transformers", "colocate": True}, "object_store"),
        ({**GPUS, "num_gpus_per_engine": 1}, "object_store"),
        ({**GPUS, "num_gpus_per_engine": 1, "weight_transfer": "nccl"}, "nccl"),
    ],
)
def test_the_backend_follows_from_where_engines_and_learners_are(engines, backend):
    learners = {"num_learners": 1, "gpus_per_learner": 1} if engines.get("num_gpus_per_engine") == 1 else {}
    made = config(
        **({"gpus_per_learner": 0.5} if "colocate" in engines and "num_gpus_per_engine" in engines else learners),
        **engines,
    )
    made.validate()
    assert made.transfer_backend() == backend


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ({"colocate": True}, "must be able to sleep.*num_gpus_per_engine.*transformers"),
        ({"colocate": True, **GPUS, "num_engines": 2, "gpus_per_learner": 0.5}, "num_engines=2 and 1 learners"),
        ({"colocate": True, **GPUS}, "num_gpus_per_engine=0.5 and num_gpus_per_learner=0; expected shares of one GPU"),
        (
            {"colocate": True, **GPUS, "gpus_per_learner": 0.5, "engine_kwargs": {"tensor_parallel_size": 2}},
            "tensor_parallel_size is 2, but with colocate",
        ),
        ({"weight_transfer": "rdma"}, "weight_transfer is 'rdma'"),
        ({"weight_transfer": "ipc"}, "'ipc', which needs engine='vllm' with num_gpus_per_engine"),
        ({"weight_transfer": "ipc", **GPUS}, "'ipc'.*set colocate too"),
        ({"weight_transfer": "nccl", **GPUS, "colocate": True, "gpus_per_learner": 0.5}, "'nccl'.*leave out colocate"),
        ({"weight_transfer": "nccl", **GPUS, "num_learners": 1}, "'nccl'.*learners in processes"),
    ],
)
def test_devices_that_cannot_be_shared_so_are_refused_before_any_actor_starts(engines, message):
    with pytest.raises(ConfigError, match=message):
        config(**engines).validate()


def test_a_backend_of_gpus_is_refused_where_there_is_none():
    for backend in ("ipc", "nccl"):
        with pytest.raises(ConfigError, match=f"weight_transfer='{backend}' needs the learner on a CUDA device"):
            weight_sender(backend, rank=0, workers_per_engine=1)


def test_only_the_first_learner_fills_the_object_store_but_all_take_part_in_gathering():
    gathered = []
    offered = ObjectStoreSender(rank=1).prepare(lambda: map(gathered.append, range(3)), 1, ())
    assert offered is None
    assert gathered == [0, 1, 2]


def offer(gpu, checksum="c", backend="ipc", arrangement="a"):
    update = {"names": ["a", "b"], "ipc_handles": [{gpu: (gpu, name)} for name in "ab"]}
    return Weights(3, checksum, arrangement, backend=backend, update=update)


def test_an_engine_finds_the_handles_of_its_own_gpu_among_those_of_all_learners():
    merged = merge_weights([offer("gpu0"), offer("gpu1")])
    assert merged.update["ipc_handles"] == [
        {"gpu0": ("gpu0", "a"), "gpu1": ("gpu1", "a")},
        {"gpu0": ("gpu0", "b"), "gpu1": ("gpu1", "b")},
    ]
    assert (merged.version, merged.checksum, merged.update["names"]) == (3, "c", ["a", "b"])
    assert merge_weights([offer("gpu0", backend="nccl"), None]) == offer("gpu0", backend="nccl")


def test_learners_that_hold_different_weights_are_told_apart():
    with pytest.raises(WeightSyncError, match=r"checksum c on the first.*'d'"):
        merge_weights([offer("gpu0"), offer("gpu1", checksum="d")])
    with pytest.raises(WeightSyncError, match=r"on the first \(arrangement a\).*'b'"):
        merge_weights([offer("gpu0"), offer("gpu1", arrangement="b")])


WEIGHTS = {"a": torch.arange(24.0).reshape(4, 6).bfloat16().t(), "b": torch.arange(3.0), "n": torch.arange(2)}


def named_weights():
    return iter(WEIGHTS.items())


@pytest.fixture
def on_cuda(monkeypatch):
    """As much of CUDA as the senders ask for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu7"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda tensor: (None, (tensor.data_ptr(),)))


@pytest.mark.vllm
def test_an_ipc_offer_is_what_vllm_takes_and_keeps_its_copies_until_it_is_withdrawn(on_cuda):
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    sender = weight_sender("ipc", rank=1, workers_per_engine=1)
    offered = sender.prepare(named_weights, 4, ())
    assert (offered.checksum, offered.arrangement) == sums(WEIGHTS.items())
    update = IPCWeightTransferUpdateInfo(**offered.update)
    assert (update.names, update.dtype_names, update.shapes) == (
        ["a", "b", "n"], ["bfloat16", "float32", "int64"], [[6, 4], [3], [2]],
    )  # fmt: skip
    assert [list(handles) for handles in update.ipc_handles] == [["gpu7"]] * 3
    assert all(copy.is_contiguous() for copy in sender._copies)
    assert [handles["gpu7"][0] for handles in update.ipc_handles] == [copy.data_ptr() for copy in sender._copies]
    sender.release()
    assert sender._copies == []


@pytest.mark.vllm
def test_an_nccl_group_is_made_of_the_learner_and_every_engines_workers_and_anew_for_other_engines(
    on_cuda, monkeypatch
):
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    met, joined = [], []

    class Group(SimpleNamespace):
        def shutdown(self):
            met.append("shut down")

        def send_weights(self):
            assert [meta.name for meta in self.source.metadata()] == [name for name, _ in self.source]
            met.append("sent")

    def trainer_init(info, *, client, source):
        client.init_weight_transfer_engine({"world_size": info.world_size, "rank_offset": 1})
        return Group()

    def engine(name):
        remote = SimpleNamespace(remote=lambda backend, info: joined.append((name, backend, info)))
        return SimpleNamespace(join_transfer=remote)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(senders.ray, "get", lambda refs, timeout: refs)
    monkeypatch.setattr(senders.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    sender = weight_sender("nccl", rank=0, workers_per_engine=2)
    engines = [engine("a"), engine("b")]
    for _ in range(2):
        offered = sender.prepare(named_weights, 4, engines)
        sender.send()
        sender.release()
    assert NCCLWeightTransferUpdateInfo(**offered.update).shapes == [[6, 4], [3], [2]]
    assert [(name, backend, info["rank_offset"], info["world_size"]) for name, backend, info in joined] == [
        ("a", "nccl", 1, 5),
        ("b", "nccl", 3, 5),
    ]
    assert met == ["sent", "sent"]
    sender.prepare(named_weights, 5, [engines[0], engine("c")])
    assert met[2:] == ["shut down"]
    assert [name for name, _, _ in joined[2:]] == ["a", "c"]

    def unreachable(refs, timeout):
        raise EngineError("no way there")

    monkeypatch.setattr(senders.ray, "get", unreachable)
    with pytest.raises(EngineError, match="no way there"):
        sender.prepare(named_weights, 6, engines)
    monkeypatch.setattr(senders.ray, "get", lambda refs, timeout: refs)
    sender.prepare(named_weights, 6, [engines[0], engine("c")])  # whose group was left
    assert [name for name, _, _ in joined[6:]] == ["a", "c"]
