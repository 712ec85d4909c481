"""The planner against traces of the learner: peaks by phase, traffic of optimizer steps, host memory beside GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trial_ray.planning.fit import Machine, make_plan
from trial_ray.planning.memory import GIB, PlanRequest, learner_phases
from trial_ray.planning.time import OPTIMIZER_TRAFFIC
from trial_ray.runs.experiment import load_experiment

ROOT = Path(__file__).parents[2]
EXAMPLES = {"Qwen3-1.7B": "alfworld_qwen3_1.7b", "Qwen2.5-3B-Instruct": "alfworld_qwen2.5_3b"}
CHANGES = {
    "checkpointing": {"gradient_checkpointing": True},
    "plain": {"gradient_checkpointing": False},
    "adapters": {"gradient_checkpointing": True, "lora_rank": 32},
}
TRACED = json.loads((ROOT / "docs/results/measurements/trace.json").read_text())["details"]
"""Traces of the learner under torch's fake tensors, in rows of 2,048 tokens with responses of 512."""


def request_of(model: str, learners: int, change: str) -> PlanRequest:
    config = load_experiment(ROOT / "tuned_examples" / f"{EXAMPLES[model]}.py").config
    sharding = "fsdp" if learners > 1 else "none"
    config.rl_module(compute_dtype="bfloat16", sharding=sharding, **CHANGES[change])
    rows = config.max_tokens_per_forward // 2048
    config.training(microbatch_rows=rows, minibatch_rows=2 * rows * learners, batch_shards=1)
    config.engines(weight_transfer="object_store").learners(num_learners=learners, num_gpus_per_learner=0.5)
    return replace(PlanRequest.of(config), max_prompt_tokens=2048 - 512, max_response_tokens=512)


@pytest.mark.parametrize("case", TRACED.values(), ids=TRACED)
def test_peaks_and_optimizer_traffic_are_those_of_a_trace(case):
    request = request_of(case["model"], case["learners"], case["change"])
    for phase, memory in learner_phases(request).items():
        # A trace contains neither the process nor the allocator.
        predicted = memory.total - memory.items["process"] - memory.items["allocator"]
        assert predicted == pytest.approx(case["phases"][phase]["peak"], rel=0.05)
    if case["change"] != "adapters":
        traffic = OPTIMIZER_TRAFFIC * request.shape.parameters / case["learners"]
        assert case["phases"]["step"]["moved"] == pytest.approx(traffic, rel=0.01)


def test_processes_on_gpus_need_host_memory():
    request = request_of("Qwen3-1.7B", 1, "checkpointing")
    actors = {memory.actor: memory for memory in make_plan(request, Machine(None, None)).actors}
    assert not actors["learner's host part"].on_gpu
    assert actors["learner's host part"].total > 3 * GIB
    needed = sum(memory.count * memory.total for memory in actors.values() if not memory.on_gpu)
    assert not make_plan(request, Machine(None, None, needed + 1)).complaints
    assert make_plan(request, Machine(None, None, needed - GIB)).complaints
