"""Weights through the object store: bit for bit, shard by shard, in any dtype."""

import pytest
import ray
import torch

from trial_ray.engines import weights
from trial_ray.engines.weights import iter_weights, pack_weights, weights_checksum

pytestmark = pytest.mark.actors


@ray.remote
def checksum_elsewhere(shards):
    return weights_checksum(iter_weights(shards))


def test_weights_cross_processes_unchanged_in_every_dtype(ray_session):
    torch.manual_seed(0)
    tensors = {
        "embed": torch.randn(20, 8),
        "half": torch.randn(3, 3).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "transposed": torch.randn(4, 6).t(),
        "counts": torch.arange(5),
    }
    shards = pack_weights(tensors.items(), 3)
    received = dict(iter_weights(shards))
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
    assert ray.get(checksum_elsewhere.remote(shards), timeout=60) == shards.checksum


def test_shards_stay_near_their_size_and_hold_everything(ray_session, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 800)
    tensors = {f"layer{index}": torch.full((100,), float(index)) for index in range(10)}  # 400 bytes each
    shards = pack_weights(tensors.items(), 0)
    assert len(shards.refs) == 5
    assert set(dict(iter_weights(shards))) == set(tensors)


def test_casting_for_the_engines_leaves_integers_alone(ray_session):
    shards = pack_weights([("w", torch.ones(2)), ("n", torch.arange(2))], 0, dtype=torch.bfloat16)
    received = dict(iter_weights(shards))
    assert received["w"].dtype == torch.bfloat16
    assert received["n"].dtype == torch.int64


def test_later_changes_of_the_learner_do_not_reach_a_version_already_sent(ray_session):
    weight = torch.ones(8)
    shards = pack_weights([("w", weight)], 0)
    weight.fill_(5)
    assert torch.equal(dict(iter_weights(shards))["w"], torch.ones(8))
