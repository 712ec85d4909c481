"""Nodes are taken away and given back while a run trains: it goes on with what there is, and ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import bench_elastic
import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


def test_two_of_four_nodes_leave_and_three_come(model_path, tmp_path, tell):
    told = bench_elastic.play(tmp_path, Path(model_path))
    measures, story = bench_elastic.report(told)
    print(*story["events"], *story["sizes"], *story["faults"], sep="\n")
    assert told.same_weights
    assert told.changed_weights, "what never changes is always equal"
    assert [each["rows/sampled"] for each in told.iterations] == [each["rows/sampled"] for each in told.fixed]
    assert [each.figure for each in measures[:2]] == [0, 0]
    assert all(each["groups/num_trained"] == 10 for each in told.iterations)
    sizes = [(each["engines"], each["env_runners"]) for each in story["sizes"]]
    assert sizes[0] == (1, 1)
    assert sizes[-1] == (5, 5)
    after = "the run goes on with the rest"
    tell(
        "a node of an engine and an env runner is drained",
        "between iterations",
        after,
        told.delay("drain"),
        told.lost(),
    )
    tell("the same, killed", "during sampling", after, told.delay("kill"), 0)
