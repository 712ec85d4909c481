"""Cost of a run: seconds by phase, figures calculated by hand, and parts of a resumed run."""

import json

import pytest

from trial_ray.runs.cost import CostMeter, cost_table

LEARNER = "learners/default_policy"
METRICS = {
    "seconds/sampling": 4.0,
    "seconds/update": 5.0,
    "seconds/sync": 1.0,
    "env_runners/num_prompt_tokens": 900,
    "env_runners/num_response_tokens": 100,
    f"{LEARNER}/scoring/seconds": 2.0,
    f"{LEARNER}/update/seconds": 2.5,
    f"{LEARNER}/update/tokens_trained": 1000,
    f"{LEARNER}/scoring/tokens_forwarded": 500,
    f"{LEARNER}/scoring/tokens_distinct": 400,
    f"{LEARNER}/update/tokens_forwarded": 600,
    f"{LEARNER}/update/tokens_distinct": 600,
}
HARDWARE = {"num_learners": 2, "matmul_flops": 1e6, "matmul_parameters": 100, "update_flops": 6}
ENGINE = {
    "busy_seconds": 6.0,
    "prompt_tokens": 800,
    "cached_tokens": 200,
    "response_tokens": 100,
    "host_bytes": 7,
    "device_bytes": None,
}


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock, and return a function that advances it."""
    passed = [100.0]
    monkeypatch.setattr("trial_ray.runs.cost.time.monotonic", lambda: sum(passed))
    return passed.append


def one_part(file, clock):
    """Measure a start of 3 s, an evaluation of 2 s, an iteration of 11 s (1 s in no phase) and 1 s more."""
    meter = CostMeter(file)
    clock(3)
    meter.started(HARDWARE)
    with meter.phase("evaluation"):
        clock(2)
    clock(11)
    meter.iteration(METRICS)
    clock(1)
    meter.actors = {"driver": {"host_bytes": 5, "device_bytes": None}, "engine 0": ENGINE, "env runner 0": None}
    return meter.write()


def test_figures_equal_a_calculation_by_hand_and_add_up_over_parts(tmp_path, clock):
    file = tmp_path / "cost.json"
    card = one_part(file, clock)
    seconds = {"start": 3, "sampling": 4, "scoring": 2, "update": 3, "sync": 1, "evaluation": 2, "checkpoint": 0}
    assert card["seconds"] == {**seconds, "other": 2}
    assert card["wall_seconds"] == 17
    assert sum(card["shares"].values()) == pytest.approx(1)
    assert card["tokens_per_second"] == {
        "sampled": 1000 / 4,
        "responses_sampled": 100 / 4,
        "trained": 1000 / 5,
        "trained_of_wall": 1000 / 17,
    }
    assert card["distinct_token_ratio"] == 1100 / 1000
    assert card["prefix_cache_hit_share"] == 0.25
    assert card["model_flops_utilisation"] == pytest.approx(100 * (6 * 600 + 2 * 500) / (2 * 1e6 * 4.5))
    assert card["busy_shares"] == {"learners": 4.5 / 17, "engines": 6 / 17}
    assert card["peak_memory_bytes"]["engine 0"] == {"host": 7, "device": None}
    assert card["peak_memory_bytes"]["env runner 0"] == {"host": None, "device": None}
    # A resumed run costs what its parts cost.
    both = one_part(file, clock)
    assert json.loads(file.read_text()) == both
    assert both["iterations"] == 2
    assert len(both["parts"]) == 2
    assert both["wall_seconds"] == 34
    for key in ("seconds", "tokens"):
        assert both[key] == {name: 2 * value for name, value in card[key].items()}
    for key in ("shares", "tokens_per_second", "model_flops_utilisation", "busy_shares", "peak_memory_bytes"):
        assert both[key] == card[key]


def test_missing_measurements_are_null(tmp_path, clock):
    meter = CostMeter(tmp_path / "cost.json")
    clock(1)
    meter.iteration({"seconds/sampling": 1.0})
    card = meter.write()
    assert card["distinct_token_ratio"] is card["model_flops_utilisation"] is card["prefix_cache_hit_share"] is None
    assert "not measured" in [cell for column in cost_table(card).columns for cell in column.cells]
