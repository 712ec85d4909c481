"""The benchmark of the control plane: all is done but a model's work, and its figures are those that were counted."""

from __future__ import annotations

import null_engine
import null_run
import pytest
import ray
from bench_control_plane import bytes_received, measures_of
from null_run import NullAlgorithm, Usage, iterate, null_config, received
from ray import cloudpickle


@pytest.mark.actors
def test_an_iteration_plays_and_trains_every_row_and_its_cost_is_counted(ray_session, model_path):
    for module in (null_engine, null_run):
        cloudpickle.register_pickle_by_value(module)
    algorithm = NullAlgorithm(config=null_config(model_path, learners=2, tasks=4, group_size=4, turns=3))
    try:
        usage = Usage(algorithm)
        point = iterate(algorithm, usage)
        fetched = received(algorithm)
        versions = ray.get([engine.weight_version.remote() for engine in algorithm.engine_pool.handles], timeout=60)
    finally:
        algorithm.stop()
        for module in (null_engine, null_run):
            cloudpickle.unregister_pickle_by_value(module)
    assert (point["turns"], point["groups"]) == (4 * 4 * 3, 4)
    assert versions == [2]
    # At most one call sends each request, and one waits again after each answer.
    assert 1 < point["exchanges"] <= 2 * point["turns"]
    assert all(point[f"{kind}_cpu_s"] > 0 for kind in ("driver", "runners"))
    assert point["phases_cpu_s"].keys() == {"sampling", "update", "sync"}
    assert 1 <= bytes_received(fetched)["received_mb"] / bytes_received(fetched)["share_mb"] < 1.5
    assert len(fetched) == 2
    (first, _), (second, _) = fetched
    assert len(first.keys() & second.keys()) < len(first)


def test_a_learner_that_fetches_the_whole_batch_misses_the_target():
    def line(most: float) -> dict[str, list[dict[str, float]]]:
        counted = {"driver_cpu_s": 1.0, "received_mb": most, "share_mb": 2.0}
        return {"learners": [{"size": 1, **counted}, {"size": 8, **counted}]}

    for most, passes in ((16.0, False), (2.3, True)):
        found = {each.name: each.passes for each in measures_of(line(most))}
        assert found["bytes that a learner receives, over its share"] is passes
    assert bytes_received([({"a": 3, "b": 1}, 1), ({"a": 3}, 0)]) == {
        "received_mb": 5e-6,
        "mean_received_mb": 4e-6,
        "share_mb": 2e-6,
    }
