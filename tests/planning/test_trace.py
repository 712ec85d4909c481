"""The planner against traces of the learner: peaks by phase, traffic, shared prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trial_ray.planning.fit import Machine, make_plan
from trial_ray.planning.memory import GIB, PlanRequest, learner_phases
from trial_ray.planning.time import (
    ADAPTERS_BACKWARD_TRAFFIC,
    BACKWARD_TRAFFIC,
    EVIDENCE_SHARE,
    FORWARD_TRAFFIC,
    GPUS,
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
from trial_ray.runs.experiment import load_experiment

ROOT = Path(__file__).parents[2]
EXAMPLES = {"Qwen3-1.7B": "alfworld_qwen3_1.7b", "Qwen2.5-3B-Instruct": "alfworld_qwen2.5_3b"}
CHANGES = {
    "checkpointing": {"gradient_checkpointing": True},
    "plain": {"gradient_checkpointing": False},
    "adapters": {"gradient_checkpointing": True, "lora_rank": 32},
}
TRACED = json.loads((ROOT / "docs/results/measurements/trace.json").read_text())["details"]
"""Of the learner itself under torch's fake tensors, in rows of 2,048 tokens with responses of 512."""


def request_of(model: str, learners: int, change: str) -> PlanRequest:
    config = load_experiment(ROOT / "tuned_examples" / f"{EXAMPLES[model]}.py").config
    sharding = "fsdp" if learners > 1 else "none"
    config.rl_module(compute_dtype="bfloat16", sharding=sharding, **CHANGES[change])
    rows = config.max_tokens_per_forward // 2048
    config.training(microbatch_rows=rows, minibatch_rows=2 * rows * learners, batch_shards=1)
    config.engines(weight_transfer="object_store").learners(num_learners=learners, num_gpus_per_learner=0.5)
    return replace(PlanRequest.of(config), max_prompt_tokens=2048 - 512, max_response_tokens=512)


def roofline_share(case: dict[str, Any], name: str) -> float:
    """As ``learner_share``, of the traced operations at a device's peaks."""
    (device,) = (gpu for gpu in GPUS if gpu.name == name)
    request = request_of(case["model"], case["learners"], case["change"])
    useful = (4 if request.lora_rank else 6) * request.shape.matmul_parameters * case["tokens"]
    seconds = sum(sum(case["phases"][phase]["seconds"][name].values()) for phase in ("forward", "backward"))
    return useful / (seconds * device.flops)


@pytest.mark.parametrize("name", TRACED)
def test_the_peak_of_every_phase_is_within_a_twentieth_of_the_traced_one(name):
    case = TRACED[name]
    for phase, memory in learner_phases(request_of(case["model"], case["learners"], case["change"])).items():
        # A trace sees neither the process nor the allocator.
        predicted = memory.total - memory.items["process"] - memory.items["allocator"]
        assert predicted == pytest.approx(case["phases"][phase]["peak"], rel=0.05)


@pytest.mark.parametrize("name", TRACED)
def test_elementwise_traffic_is_within_a_tenth_of_the_traced_one(name):
    case = TRACED[name]
    request = request_of(case["model"], case["learners"], case["change"])
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
    request = request_of(case["model"], 1, case["change"])
    traced = roofline_share(case, device.name)
    assert learner_share(request, device) / ROOFLINE_SHARE == pytest.approx(traced, rel=0.1)


@pytest.mark.parametrize("style", ["tagged", "conversation"])
def test_shared_prefixes_are_those_measured_in_official_games(style):
    measured = json.loads((ROOT / "benchmarks/results/prefixes.json").read_text())["details"]
    assert measured["games"] == "official"
    (case,) = (
        each
        for each in measured["cases"]
        if (each["style"], each["random_actions"], each["learners"]) == (style, 0.5, 8)
    )
    assert SHARED_PREFIXES[style] == pytest.approx((case["scoring"], case["update"]), rel=0.05)
    if style == "tagged":
        assert pytest.approx(case["privileged_view"], rel=0.1) == EVIDENCE_SHARE


# -- what else the plan counts -----------------------------------------------------------------------------------------


def test_processes_on_gpus_have_host_memory():
    request = request_of("Qwen3-1.7B", 1, "checkpointing")
    found = {actor.actor: actor for actor in make_plan(request, Machine(None, None)).actors}
    assert not found["learner's host part"].on_gpu
    assert found["learner's host part"].total > 3 * GIB
    needed = sum(each.count * each.total for each in found.values() if not each.on_gpu)
    assert not make_plan(request, Machine(None, None, needed + 1)).complaints
    assert make_plan(request, Machine(None, None, needed - GIB)).complaints


def test_sharding_divides_what_is_kept_by_the_learners_of_a_copy():
    request = request_of("Qwen3-1.7B", 8, "plain")
    kept = learner_phases(request)["step"].items
    nodes = learner_phases(replace(request, fsdp_size=4))["step"].items
    assert all(nodes[name] == 2 * kept[name] for name in ("weights", "gradients", "optimizer", "reference"))


def test_the_range_of_an_iteration_holds_its_prediction_and_leaves_sampling_alone():
    request = request_of("Qwen3-1.7B", 1, "checkpointing")
    phases, _ = step_time(request, gpu_like(80))
    least, most = iteration_range(phases)
    assert phases["sampling"] + phases["sync"] < least < sum(phases.values()) < most
    assert iteration_range(phases | {"scoring": 0.0, "update": 0.0}) == pytest.approx(
        (phases["sampling"] + phases["sync"],) * 2
    )
