"""The benchmark of the control plane: all is done but a model's work, and its figures are those that were counted."""

from __future__ import annotations

import null_engine
import null_run
import pytest
import ray
from bench_control_plane import bytes_received, measures_of
from null_run import NullAlgorithm, Received, Usage, iterate, null_config, received
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
    first, second = fetched
    assert len(first.rows.keys() & second.rows.keys()) < len(first.rows)
    assert first.headers == second.headers > 0
    assert all(each.references > 4 * 100 for each in fetched), "each of four groups is a reference"
    figures = bytes_received(fetched)
    assert 1 <= figures["rows_mb"] / figures["share_mb"] < 1.5


def test_a_learner_that_fetches_the_whole_batch_misses_the_target():
    def line(most: float) -> dict[str, list[dict[str, float]]]:
        kinds = dict.fromkeys(("rows_mb", "headers_mb", "references_mb", "exchanged_mb"), most / 4)
        counted = {"driver_cpu_s": 1.0, "received_mb": most, "share_mb": 2.0, **kinds}
        return {"learners": [{"size": 1, **counted}, {"size": 8, **counted}]}

    for most, passes in ((16.0, False), (2.3, True)):
        found = {each.name: each.passes for each in measures_of(line(most))}
        assert found["bytes that a learner receives, over its share"] is passes
    figures = bytes_received([Received(1, 2, {"a": 3, "b": 1}, 4), Received(1, 2, {"a": 3}, 1)])
    assert {name: round(1e6 * value) for name, value in figures.items()} == {
        "received_mb": 11,
        "rows_mb": 4,
        "headers_mb": 1,
        "references_mb": 2,
        "exchanged_mb": 4,
        "mean_received_mb": 9,
        "share_mb": 2,
    }
