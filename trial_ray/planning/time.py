"""Time of an iteration by phase, from floating-point operations, and the devices that it is predicted for."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from trial_ray.planning.memory import GIB, PlanRequest
from trial_ray.rollout.hindsight import FRAMES

TURNS_SHARE, PROMPT_SHARE, RESPONSE_SHARE = 0.6, 0.45, 0.2
"""Lengths over their limits. With the paper's limits: 3.9 million tokens an iteration; a published run of it had 3.83 million."""
_CONVERSATION = (2.33, 2.16)
SHARED_PREFIXES = {"tagged": (1.21, 1.11), "conversation": _CONVERSATION, "tools": _CONVERSATION, "plain": (2.2, 2.2)}
"""By prompt style, tokens of rows over those that the learner computes, in scoring and in the minibatches of an update: tagged and
conversation ones of ``benchmarks/bench_prefixes.py``, half of whose actions in official games are random, also assumed of tools;
plain ones of the quickstart."""
EVIDENCE_SHARE = 0.3
"""Tokens that a second view adds to those of the first, measured there (tagged). One in front of the prompt shares none, and
adds as many."""
LEARNER_SHARE, LEAST_SHARE, MOST_SHARE = 0.25, 0.15, 0.4
"""Share of a device's peak that the products of the learner's passes reach, and how far that may be off. An assumption."""
OPTIMIZER_TRAFFIC = 54
"""Bytes moved of a parameter in an optimizer step: flags of finiteness, clipping, AdamW; traced, of float32 weights."""
PREFILL_UTILISATION = 0.4
BANDWIDTH_UTILISATION = 0.6
DECODE_OVERHEAD_S = 0.005
"""Time of a decoding step beside its arithmetic and memory traffic."""
CACHED_SHARE = 0.5
"""Share of prompt tokens that the engine's prefix cache has."""
ENVIRONMENT_STEP_S = 0.01
HOST_BANDWIDTH = 10e9
"""Bytes per second that a CPU reads out of memory; an assumption."""
SYNC_BYTES_PER_S = 1e9
"""Weights out of the learner, through the object store, into an engine, with their checksums."""


@dataclass(frozen=True, slots=True)
class Device:
    """What computes.

    Attributes:
        name: for a person; of a GPU, that of ``accelerator_type:...`` among the resources of Ray's nodes.
        flops: operations per second of dense matrix products, in bfloat16 on a GPU (float16 where it has none).
        bandwidth: bytes per second out of its memory.
        gib: its memory.
    """

    name: str
    flops: float
    bandwidth: float
    gib: float


GPUS = (
    Device("T4", 65e12, 0.32e12, 15),
    Device("V100", 125e12, 0.90e12, 16),
    Device("L4", 121e12, 0.30e12, 22),
    Device("A10G", 70e12, 0.60e12, 22),
    Device("A100-40G", 312e12, 1.55e12, 39),
    Device("L40S", 362e12, 0.86e12, 44),
    Device("A100-80G", 312e12, 2.0e12, 79),
    Device("H100", 989e12, 3.35e12, 79),
    Device("H200", 989e12, 4.8e12, 140),
    Device("B200", 2250e12, 8.0e12, 179),
)
"""Published peaks, of the SXM form where there are several, and the memory that a process finds."""


def gpu_like(gib: float, name: str = "") -> Device:
    """The GPU of that type, and else, or of several sizes, that with the nearest memory.

    Args:
        gib: memory of the GPU.
        name: as its driver has it; empty where only the memory is known.
    """
    words = re.findall(r"\w+", name)
    named = [device for device in GPUS if device.name.split("-")[0] in words]
    return min(named or GPUS, key=lambda device: abs(device.gib - gib))


@dataclass(frozen=True, slots=True)
class InstalledGPU:
    """An NVIDIA GPU of this host: name, memory in MiB and version of the driver."""

    name: str
    mib: int
    driver: str


def installed_gpus() -> tuple[list[InstalledGPU], str]:
    """NVIDIA GPUs of this host, and why the driver lists none; no reason on a host without ``nvidia-smi``."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as error:
        return [], f"nvidia-smi failed: {error}"
    rows = re.findall(r"^(.+), (\d+), (\d+\..*)$", done.stdout, re.MULTILINE)
    printed = " ".join(done.stdout.split()) or "it printed nothing"
    found = [InstalledGPU(name, int(mib), driver) for name, mib, driver in rows]
    return found, "" if found else f"nvidia-smi lists no GPU: {printed}"


def gpu_bytes(cluster_resources: Mapping[str, float]) -> float | None:
    """Memory of the largest GPU that this host or Ray's nodes are known to have; ``None`` if none is known.

    The largest, because a run is only refused where it fits on none of them.
    """
    known = [gpu.gib * GIB for gpu in GPUS if f"accelerator_type:{gpu.name}" in cluster_resources]
    return max([*(gpu.mib * 2**20 for gpu in installed_gpus()[0]), *known], default=None)


def step_time(request: PlanRequest, device: Device) -> tuple[dict[str, float], float]:
    """Predicted seconds of an iteration by phase, without evaluation, and the tokens of its rows.

    Every actor that computes does so on a device of its kind, and one phase follows the other.
    """
    turns = max(1.0, TURNS_SHARE * request.max_turns)
    prompt, response = PROMPT_SHARE * request.max_prompt_tokens, max(1.0, RESPONSE_SHARE * request.max_response_tokens)
    tokens = request.trajectories * turns * (prompt + response)
    steps = math.ceil(request.trajectories * turns / request.minibatch_rows)
    moved = OPTIMIZER_TRAFFIC * request.trained_parameters
    optimizer = moved / (request.shards * device.bandwidth * BANDWIDTH_UTILISATION)
    scored, updated = SHARED_PREFIXES[request.prompt_style]
    view = request.teacher_context
    second_view = 0.0 if view is None else 1.0 if FRAMES[view].in_front else EVIDENCE_SHARE
    # Operations for a weight: of the passes that score all views and models, and of an update's.
    score = 2 * (1 + second_view + request.num_references + (request.lora_rank > 0))
    update = (4 if request.lora_rank else 6) + 2 * request.gradient_checkpointing
    operation = tokens * request.shape.matmul_parameters / (device.flops * LEARNER_SHARE * request.num_learners)
    phases = {
        "sampling": _sampling(request, device, turns, prompt, response),
        "scoring": score * operation / scored,
        "update": request.num_epochs * (update * operation / updated + steps * optimizer),
        "sync": request.shape.parameters * request.engine_bytes / SYNC_BYTES_PER_S,
    }
    return phases, tokens


def _sampling(request: PlanRequest, device: Device, turns: float, prompt: float, response: float) -> float:
    """Seconds of the rollouts, in waves of what the engines decode at a time; a step reads weights and cache, or computes."""
    shape, split, asked = request.shape, request.tensor_parallel_size, request.requests_per_engine
    batch = min(request.most_rows, asked)
    waves = math.ceil(asked / batch)
    prefilled = 2 * shape.matmul_parameters / split / (device.flops * PREFILL_UTILISATION)
    cached = batch * (prompt + response) * shape.kv_elements_per_token
    traffic = (shape.parameters + cached) * request.engine_bytes / (device.bandwidth * BANDWIDTH_UTILISATION)
    decoded = max(traffic / split, batch * prefilled) + DECODE_OVERHEAD_S
    prefill = asked * turns * prompt * (1 - CACHED_SHARE) * prefilled
    return waves * turns * response * decoded + prefill + waves * turns * ENVIRONMENT_STEP_S


def iteration_range(phases: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of an iteration where the learner reaches most and least of a device's peak."""
    learner = phases["scoring"] + phases["update"]
    others = sum(phases.values()) - learner
    return others + learner * LEARNER_SHARE / MOST_SHARE, others + learner * LEARNER_SHARE / LEAST_SHARE
