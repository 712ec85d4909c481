"""The planner against traces of the learner: peaks by phase, traffic, shared prefixes, and the tables of docs/scaling.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_trace
import pytest

from trial_ray.models.model_shape import PUBLISHED, model_shape
from trial_ray.planning.learner import learner_phases
from trial_ray.planning.memory import CHECKPOINT, Machine, make_plan
from trial_ray.planning.request import GIB
from trial_ray.planning.step_time import (
    ADAPTERS_BACKWARD_TRAFFIC,
    BACKWARD_TRAFFIC,
    EVIDENCE_SHARE,
    FORWARD_TRAFFIC,
    OPTIMIZER_TRAFFIC,
    RECOMPUTED_TRAFFIC,
    ROOFLINE_SHARE,
    SHARED_PREFIXES,
    adapter_traffic,
    elementwise_traffic,
    gpu_like,
    iteration_range,
    learner_share,
    step_time,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TRACED = json.loads((RESULTS / "trace.json").read_text())["details"]
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 20_000,
}


@pytest.mark.parametrize("name", TRACED)
def test_the_peak_of_every_phase_is_within_a_twentieth_of_the_traced_one(name):
    assert max(map(abs, bench_trace.deviations(TRACED[name]).values())) < 0.05


@pytest.mark.parametrize("change", ["checkpointing", "adapters"])
def test_the_learner_as_it_is_now_peaks_where_the_plan_says(change, monkeypatch):
    """The committed traces are of an earlier learner: one of a small model is traced here."""
    monkeypatch.setitem(PUBLISHED, "Qwen/Qwen3-1.7B", PUBLISHED["Qwen/Qwen3-1.7B"] | SMALL)
    model_shape.cache_clear()
    monkeypatch.setattr(bench_trace, "ITERATION", 1)
    try:
        case = {"model": "Qwen3-1.7B", "learners": 1, "change": change, **bench_trace.trace("Qwen3-1.7B", 1, change)}
        found = bench_trace.deviations(case)
    finally:
        model_shape.cache_clear()
    assert set(found) == {"scoring", "forward", "backward", "step"}
    assert max(map(abs, found.values())) < 0.06


@pytest.mark.parametrize("name", TRACED)
def test_elementwise_traffic_is_within_a_tenth_of_the_traced_one(name):
    case = TRACED[name]
    request = bench_trace.request_of(case["model"], case["learners"], case["change"])
    moved = {phase: each["moved"] for phase, each in case["phases"].items()}
    plain, adapters = elementwise_traffic(request), adapter_traffic(request)
    # The reference scores the ordinary view, which is as long as the update's rows; adapters are off.
    policy = case["scored_tokens"] - case["tokens"]
    assert case["scored_tokens"] * plain + policy * adapters == pytest.approx(moved["scoring"], rel=0.1)
    backward = ADAPTERS_BACKWARD_TRAFFIC if request.lora_rank else BACKWARD_TRAFFIC
    times = FORWARD_TRAFFIC + backward + RECOMPUTED_TRAFFIC * request.gradient_checkpointing
    assert case["tokens"] * times * (plain + adapters) == pytest.approx(moved["forward"] + moved["backward"], rel=0.1)
    if not request.lora_rank:
        stepped = request.shape.parameters / case["learners"]
        assert moved["step"] == pytest.approx(OPTIMIZER_TRAFFIC * stepped, rel=0.01)


@pytest.mark.parametrize("name", [name for name, case in TRACED.items() if case["learners"] == 1])
@pytest.mark.parametrize("gpu", [80.0, 140.0])
def test_the_learners_share_of_the_peak_is_that_of_the_traced_roofline(name, gpu):
    case, device = TRACED[name], gpu_like(gpu)
    request = bench_trace.request_of(case["model"], 1, case["change"])
    traced = bench_trace.roofline_share(case, device.name)
    assert learner_share(request, device) / ROOFLINE_SHARE == pytest.approx(traced, rel=0.1)


@pytest.mark.parametrize("style", ["tagged", "conversation"])
def test_shared_prefixes_are_those_measured_in_official_games(style):
    measured = json.loads((RESULTS / "prefixes.json").read_text())["details"]
    assert measured["games"] == "official"
    (case,) = (
        each
        for each in measured["cases"]
        if (each["style"], each["random_actions"], each["learners"]) == (style, 0.5, 8)
    )
    assert SHARED_PREFIXES[style] == pytest.approx((case["scoring"], case["update"]), rel=0.05)
    if style == "tagged":
        assert pytest.approx(case["privileged_view"], rel=0.1) == EVIDENCE_SHARE


def test_the_tables_of_the_page_are_those_of_plan_and_traces():
    page = bench_trace.PAGE.read_text(encoding="utf-8")
    assert bench_trace.memory_table(TRACED) in page, "run: python benchmarks/bench_trace.py --table"
    assert bench_trace.fill_page(page, TRACED) == page, "run: python benchmarks/bench_trace.py --table"


# -- what else the plan counts -----------------------------------------------------------------------------------------


def test_processes_on_gpus_have_host_memory_and_checkpoints_need_no_room():
    request = bench_trace.request_of("Qwen3-1.7B", 1, "checkpointing")
    found = {actor.actor: actor for actor in make_plan(request, Machine(None, None)).actors}
    assert not found["learner's host part"].on_gpu
    assert found["learner's host part"].total > 3 * GIB
    assert found[CHECKPOINT].total == 12 * request.shape.parameters  # weights and two moments, float32
    needed = sum(each.count * each.total for each in found.values() if not each.on_gpu and each.actor != CHECKPOINT)
    assert not make_plan(request, Machine(None, None, needed + 1)).complaints
    assert make_plan(request, Machine(None, None, needed - GIB)).complaints


def test_sharding_divides_what_is_kept_by_the_learners_of_a_copy():
    request = bench_trace.request_of("Qwen3-1.7B", 8, "plain")
    kept = learner_phases(request)["step"].items
    nodes = learner_phases(replace(request, fsdp_size=4))["step"].items
    assert all(nodes[name] == 2 * kept[name] for name in ("weights", "gradients", "optimizer", "reference"))


def test_the_range_of_an_iteration_holds_its_prediction_and_leaves_sampling_alone():
    request = bench_trace.request_of("Qwen3-1.7B", 1, "checkpointing")
    phases, _ = step_time(request, gpu_like(80))
    least, most = iteration_range(phases)
    assert phases["sampling"] + phases["sync"] < least < sum(phases.values()) < most
    assert iteration_range(phases | {"scoring": 0.0, "update": 0.0}) == pytest.approx(
        (phases["sampling"] + phases["sync"],) * 2
    )
