"""The planner against traces of the learner: peaks by phase, optimizer steps, shared prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trial_ray.planning.fit import Machine, make_plan
from trial_ray.planning.memory import GIB, PlanRequest, learner_phases
from trial_ray.planning.time import (
    OPTIMIZER_TRAFFIC,
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


@pytest.mark.parametrize("name", TRACED)
def test_the_peak_of_every_phase_is_within_a_twentieth_of_the_traced_one(name):
    case = TRACED[name]
    for phase, memory in learner_phases(request_of(case["model"], case["learners"], case["change"])).items():
        # A trace sees neither the process nor the allocator.
        predicted = memory.total - memory.items["process"] - memory.items["allocator"]
        assert predicted == pytest.approx(case["phases"][phase]["peak"], rel=0.05)


@pytest.mark.parametrize("name", [name for name, case in TRACED.items() if case["change"] != "adapters"])
def test_the_traffic_of_an_optimizer_step_is_the_traced_one(name):
    case = TRACED[name]
    stepped = request_of(case["model"], case["learners"], case["change"]).shape.parameters / case["learners"]
    assert case["phases"]["step"]["moved"] == pytest.approx(OPTIMIZER_TRAFFIC * stepped, rel=0.01)


# -- what else the plan counts -----------------------------------------------------------------------------------------


def test_processes_on_gpus_have_host_memory():
    request = request_of("Qwen3-1.7B", 1, "checkpointing")
    found = {actor.actor: actor for actor in make_plan(request, Machine(None, None)).actors}
    assert not found["learner's host part"].on_gpu
    assert found["learner's host part"].total > 3 * GIB
    needed = sum(each.count * each.total for each in found.values() if not each.on_gpu)
    assert not make_plan(request, Machine(None, None, needed + 1)).complaints
    assert make_plan(request, Machine(None, None, needed - GIB)).complaints
