"""The learner's phases on fake tensors: peak memory against `trial-ray plan`, and what a device's peaks allow of its time.

    python benchmarks/bench_trace.py --json benchmarks/results/trace.json    # 15 minutes
    python benchmarks/bench_trace.py --table                                 # writes its tables into docs/scaling.md

The learner itself runs, as it would on a GPU: scoring, and a minibatch of two full forward passes with their gradients and
AdamW's step. Replaced are the weights' files, FlexAttention's kernel (see ``op_trace.py``) and what learners exchange. Leaves
out: workspaces of kernels, the allocator's rounding, engines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from measure import Measure, write_report

RESULT = Path(__file__).parent / "results" / "trace.json"
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
EXAMPLES = {"Qwen3-1.7B": "alfworld_qwen3_1.7b", "Qwen2.5-3B-Instruct": "alfworld_qwen2.5_3b"}
LEARNERS = (1, 4, 8)
CHANGES: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "plain": {"gradient_checkpointing": False},
    "adapters": {"gradient_checkpointing": True, "lora_rank": 32},
}
ROW_INPUTS, RESPONSE = 2048, 512
"""Inputs of a row, whose number fills a pass exactly, and its response: the limits of the tuned examples."""
PASSES = 2
"""Of a minibatch: the second finds gradients of the first."""
HELD = 8
"""Kinds of tensors at a peak that are listed, the largest."""
DEVICES = ("A100-80G", "H100", "H200")
PLANNED = ("A100-80G", "H100")
ITERATION = 30
"""In which the dense term of the tuned examples acts."""


def config_of(model: str, learners: int, change: str) -> Any:
    from trial_ray.runs.experiment import load_experiment

    path = Path(__file__).parents[1] / "tuned_examples" / f"{EXAMPLES[model]}.py"
    config = load_experiment(path).config.rl_module(
        compute_dtype="bfloat16", sharding="fsdp" if learners > 1 else "none", **CHANGES[change]
    )
    rows = config.max_tokens_per_forward // ROW_INPUTS
    config.training(microbatch_rows=rows, minibatch_rows=rows * PASSES * learners, batch_shards=1)
    config.engines(weight_transfer="object_store")
    return config.learners(num_learners=learners, num_gpus_per_learner=0.5)


def groups_of(config: Any, vocabulary: int) -> list[Any]:
    """A minibatch of rows without common prefixes."""
    from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

    rng = np.random.default_rng(0)

    def trajectory(task: int, rollout: int) -> Trajectory:
        ids = rng.integers(10, vocabulary, ROW_INPUTS + 1).astype(np.int32)
        prompt, response = ids[:-RESPONSE], ids[-RESPONSE:]
        values = np.zeros(RESPONSE, np.float32), 1, len(prompt) - 1, "You are in a room.", "look", True
        turn = Turn(prompt, response, *values, "Nothing happens.", 0.0, "stop")
        return Trajectory(f"task {task}", "look", rollout, [turn], bool(rollout % 2), float(rollout % 2))

    tasks = config.minibatch_rows // config.group_size
    return [
        TrajectoryGroup(f"task {task}", [trajectory(task, rollout) for rollout in range(config.group_size)])
        for task in range(tasks)
    ]


def save_config(folder: Path, model: str) -> None:
    """A model folder without weights."""
    import transformers

    from trial_ray.environments.alfworld import ADAPTER
    from trial_ray.models.model_shape import PUBLISHED
    from trial_ray.models.tiny import build_tokenizer

    sizes = dict(PUBLISHED[f"Qwen/{model}"])
    config = getattr(transformers, sizes.pop("architecture"))(**sizes)
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    build_tokenizer(ADAPTER.warm_start.vocabulary).save_pretrained(folder)


def trace(model: str, learners: int, change: str) -> dict[str, Any]:
    """Peaks and work of one learner by phase."""
    import torch
    from learners import build_learner
    from op_trace import OpTrace, attention, start_fake_learners, wide_product
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from trial_ray.learner import packing
    from trial_ray.learner.connectors import Scoring
    from trial_ray.learner.exchange import LearnerExchange
    from trial_ray.learner.passes import MicrobatchPasses
    from trial_ray.models import logprobs, module, tree_attention
    from trial_ray.models.layout import Layout, set_layout
    from trial_ray.models.lora import Adapter

    def empty_causal_lm(path: str, dtype: str) -> Any:
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path),
            dtype=getattr(torch, dtype),
            attn_implementation=tree_attention.register(),
        )
        # Not measured, which would be traced.
        set_layout(lm, Layout("tree", tree_attention.register(), 0.0, 0.0))
        return lm.eval()

    def set_up(self: Any) -> None:
        with follower.fake:
            setup(self)

    def attend(*inputs: Any, **_: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):  # as FlexAttention does
            inputs = tuple(each.to(torch.get_autocast_dtype("cpu")) for each in inputs)
        return attention(*inputs)[0]

    def in_phase(function: Any, name: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with follower.during(name if isinstance(name, str) else name(self)):
                return function(self, *args, **kwargs)

        return call

    setup = module.CausalLMModule.setup
    config = config_of(model, learners, change)
    follower = OpTrace(FakeTensorMode(allow_non_fake_inputs=True), visible_keys=ROW_INPUTS / 2)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_config(folder, model)
        config.rl_module(model_path=str(folder)).learners(num_gpus_per_learner=0)
        config.training(max_logprob_gap=1e9)
        if learners > 1:
            start_fake_learners(learners)
            stack.enter_context(mock.patch.object(torch.distributed, "new_group"))
        for place, name, replacement in (
            (module, "empty_causal_lm", empty_causal_lm),
            (module, "fill", lambda *_: None),
            (torch.nn.Module, "to", lambda self, *_, **__: self),  # all is there in its type; fake parameters refuse
            (Adapter, "initialise", lambda self: None),
            (module.CausalLMModule, "setup", set_up),
            (tree_attention, "flex_attention", attend),
            (logprobs, "_wide_product", wide_product),
            # As on a GPU: large packs, and a mask by blocks.
            (packing, "_CPU_TOKENS", config.max_tokens_per_forward),
            (packing, "block_size", lambda lm: tree_attention.FLEX_BLOCK),
            (logprobs, "attention_inputs", lambda lm, exits: {"attention_mask": tree_attention.tree_block_mask(exits)}),
            (LearnerExchange, "gather", lambda self, value: [value]),
            (Scoring, "_score_sequences", in_phase(Scoring._score_sequences, "scoring")),
            (MicrobatchPasses, "_forward", in_phase(MicrobatchPasses._forward, "forward")),
            (MicrobatchPasses, "backward", in_phase(MicrobatchPasses.backward, "backward")),
        ):
            stack.enter_context(mock.patch.object(place, name, replacement, create=True))
        stack.enter_context(follower)
        learner = build_learner(config)
        for name in ("_exchanged_gradients", "_finite", "postprocess_gradients", "apply_gradients"):
            kind = type(learner)
            stack.enter_context(mock.patch.object(kind, name, in_phase(getattr(kind, name), "step")))
        vocabulary = learner.policy_module.lm.config.vocab_size
        kept = follower.live
        learner.update(episodes=groups_of(config, vocabulary), timesteps={"training_iteration": ITERATION})
    return {
        "tokens": follower.tokens["forward"],
        "scored_tokens": follower.tokens["scoring"],
        "kept": kept,
        "phases": {phase: described(follower, phase) for phase in follower.peaks},
    }


def described(follower: Any, phase: str) -> dict[str, Any]:
    """Peak and work of a phase."""
    from trial_ray.planning.step_time import GPUS

    work = [each for (within, _), found in follower.work.items() for each in found if within == phase]
    held = list(follower.held_at_peak(phase).items())[:HELD]
    return {
        "peak": follower.peaks[phase],
        "held": dict(held),
        "flops": sum(each.flops for each in work),
        "moved": sum(each.moved for each in work if not each.flops),
        "seconds": {gpu.name: seconds(follower, phase, gpu) for gpu in GPUS if gpu.name in DEVICES},
    }


def seconds(follower: Any, phase: str, gpu: Any) -> dict[str, float]:
    """Roofline of a phase on a device, by kind of operation."""
    found = dict.fromkeys(("products", "attention", "elementwise"), 0.0)
    for (within, name), operations in follower.work.items():
        for each in operations if within == phase else ():
            kind = "attention" if "attention" in name else "products" if each.flops else "elementwise"
            found[kind] += each.seconds(gpu.flops, gpu.bandwidth)
    return found


def request_of(model: str, learners: int, change: str) -> Any:
    """What a plan of the same learner is made for."""
    from trial_ray.planning.request import PlanRequest

    request = PlanRequest.of(config_of(model, learners, change))
    return replace(request, max_prompt_tokens=ROW_INPUTS - RESPONSE, max_response_tokens=RESPONSE)


def predicted_peaks(request: Any) -> dict[str, float]:
    """The plan's peaks by phase, without what a trace does not see: the process and the allocator."""
    from trial_ray.planning.learner import learner_phases

    return {
        phase: memory.total - memory.items["process"] - memory.items["allocator"]
        for phase, memory in learner_phases(request).items()
    }


def compare(model: str, learners: int, change: str) -> dict[str, Any]:
    """Trace, in a process of its own."""
    command = [sys.executable, __file__, "--measure", model, str(learners), change]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    traced = json.loads(done.stdout.splitlines()[-1])
    return {"model": model, "learners": learners, "change": change, **traced}


def deviations(case: dict[str, Any]) -> dict[str, float]:
    """By phase, how far the plan's peak is from the traced one, relative to it."""
    predicted = predicted_peaks(request_of(case["model"], case["learners"], case["change"]))
    return {phase: predicted[phase] / each["peak"] - 1 for phase, each in case["phases"].items()}


def measures(result: dict[str, Any]) -> list[Measure]:
    """The lines of the table of all benchmarks."""
    found = []
    for model in dict.fromkeys(case["model"] for case in result.values()):
        off = {
            f"{phase}, {name.split(', ', 1)[1]}": 100 * abs(deviation)
            for name, case in result.items()
            if case["model"] == model
            for phase, deviation in deviations(case).items()
        }
        worst = max(off, key=lambda each: off[each])
        name = f"{model}: the plan's peak of a learner in any phase against a trace, off by"
        found.append(Measure(name, off[worst], "%", 5, "lower", f"most in {worst}"))
    return found


def memory_table(result: dict[str, Any]) -> str:
    """Traced peak of a learner, in the phase in which it is largest. GiB."""
    lines = [f"| model | learners | {' | '.join(CHANGES)} |", "| --- " * (2 + len(CHANGES)) + "|"]
    peaks = {
        (case["model"], case["learners"], case["change"]): max(phase["peak"] for phase in case["phases"].values())
        for case in result.values()
    }
    for model, learners in dict.fromkeys(key[:2] for key in peaks):
        cells = [f"{peaks[model, learners, change] / 2**30:.1f}" for change in CHANGES]
        lines.append(f"| {model} | {learners} | {' | '.join(cells)} |")
    return "\n".join(lines)


def roofline_table(result: dict[str, Any]) -> str:
    """Share of each device's peak that products of an update reach on the roofline; one learner."""
    lines = [f"| model | | {' | '.join(DEVICES)} |", "| --- " * (2 + len(DEVICES)) + "|"]
    for case in result.values():
        if case["learners"] == 1:
            shares = [f"{roofline_share(case, device):.0%}" for device in DEVICES]
            lines.append(f"| {' | '.join([case['model'], case['change'], *shares])} |")
    return "\n".join(lines)


def roofline_share(case: dict[str, Any], name: str) -> float:
    """As ``trial_ray.planning.step_time.learner_share``, of the traced operations at a device's peaks."""
    from trial_ray.planning.step_time import GPUS

    (device,) = (gpu for gpu in GPUS if gpu.name == name)
    request = request_of(case["model"], case["learners"], case["change"])
    useful = (4 if request.lora_rank else 6) * request.shape.matmul_parameters * case["tokens"]
    seconds = sum(sum(case["phases"][phase]["seconds"][name].values()) for phase in ("forward", "backward"))
    return useful / (seconds * device.flops)


def plan_table() -> str:
    """The plan of each tuned example, learners and engines taking turns: seconds of an iteration."""
    from trial_ray.planning.request import PlanRequest
    from trial_ray.planning.step_time import GPUS, iteration_range, step_time

    head = ("model", "GPUs", "sampling", "scoring", "update", "iteration", "range")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for model, number, name in itertools.product(EXAMPLES, LEARNERS, PLANNED):
        (gpu,) = (each for each in GPUS if each.name == name)
        config = config_of(model, 1, "checkpointing")
        config.training(minibatch_rows=256, microbatch_rows=32, batch_shards=8)
        config.learners(num_learners=number).engines(num_engines=number)
        request = PlanRequest.of(config)
        phases, _ = step_time(request, gpu)
        seconds = [phases["sampling"], phases["scoring"], phases["update"], sum(phases.values())]
        cells = [model, f"{number}×{name}", *(f"{each:.0f}" for each in seconds)]
        least, most = iteration_range(phases)
        lines.append(f"| {' | '.join([*cells, f'{least:.0f}–{most:.0f}'])} |")
    return "\n".join(lines)


def fill_page(page: str, result: dict[str, Any]) -> str:
    """``page`` with its tables between their markers."""
    tables = {"planned": plan_table(), "memory": memory_table(result), "roofline": roofline_table(result)}
    for name, table in tables.items():
        block = re.compile(rf"(<!-- {name} table -->\n).*?(<!-- end -->)", re.DOTALL)
        page = block.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--learners", nargs="+", type=int, default=list(LEARNERS))
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument(
        "--measure", nargs=3, metavar=("MODEL", "LEARNERS", "CHANGE"), help="in this process, print JSON"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="run nothing: write the tables into docs/scaling.md")
    args = parser.parse_args()
    if args.table:
        result = json.loads(RESULT.read_text(encoding="utf-8"))["details"]
        PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
        return
    if args.measure:
        model, learners, change = args.measure
        print(json.dumps(trace(model, int(learners), change)))
        return
    result = {}
    for model, learners, change in itertools.product(args.models, args.learners, args.changes):
        result[f"{model}, {learners} learners, {change}"] = compare(model, learners, change)
    write_report(args.json, measures(result), result)


if __name__ == "__main__":
    main()
