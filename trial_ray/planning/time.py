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
SHARED_PREFIXES = {"tagged": (1.21, 1.11), "conversation": (2.33, 2.16), "plain": (2.2, 2.2)}
"""By prompt style, tokens of rows over those that the learner computes, in scoring and in the minibatches of an update: tagged and
conversation ones of ``benchmarks/bench_prefixes.py``, half of whose actions in official games are random; plain ones of the
quickstart."""
EVIDENCE_SHARE = 0.3
"""Tokens that a second view adds to those of the first, measured there (tagged). One in front of the prompt shares none, and
adds as many."""
ROOFLINE_SHARE, LEAST_SHARE, MOST_SHARE = 0.7, 0.5, 0.9
"""Share of a device's peaks (arithmetic or memory) that the learner's kernels reach, and how far that may be off. An assumption."""
FORWARD_TRAFFIC, BACKWARD_TRAFFIC, ADAPTERS_BACKWARD_TRAFFIC, RECOMPUTED_TRAFFIC = 1.1, 2.65, 1.75, 0.95
"""Elementwise traffic of a forward pass with entropies, of a backward pass of all weights or of adapters, and of what checkpointing
computes again, over that of a pass that scores: traced (``docs/results/measurements/trace.json``)."""
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
    """Memory of the largest GPU that this host or Ray's nodes are known to have; ``None`` where none is known.

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
    optimizer = moved / (request.shards * device.bandwidth * ROOFLINE_SHARE)
    scored, updated = SHARED_PREFIXES[request.prompt_style]
    phases = {
        "sampling": _sampling(request, device, turns, prompt, response),
        "scoring": tokens * _scored_token(request, device) / scored,
        "update": request.num_epochs * (tokens * _updated_token(request, device) / updated + steps * optimizer),
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


def _scored_token(request: PlanRequest, device: Device) -> float:
    """Seconds on all learners of a token of the rows, in all passes without gradients before the steps."""
    view = request.privileged_view
    second_view = 0.0 if view is None else 1.0 if FRAMES[view].in_front else EVIDENCE_SHARE
    traffic = elementwise_traffic(request)
    frozen_passes = request.num_references + (request.lora_rank > 0)
    moved = (1 + second_view) * (traffic + adapter_traffic(request)) + frozen_passes * traffic
    return _roofline(request, device, 2 * (1 + second_view + frozen_passes), moved)


def _updated_token(request: PlanRequest, device: Device) -> float:
    """Seconds of a token that the learners compute in the forward and backward passes of an update."""
    again = request.gradient_checkpointing
    backward = ADAPTERS_BACKWARD_TRAFFIC if request.lora_rank else BACKWARD_TRAFFIC
    traffic = elementwise_traffic(request) + adapter_traffic(request)
    traffic *= FORWARD_TRAFFIC + backward + RECOMPUTED_TRAFFIC * again
    return _roofline(request, device, (4 if request.lora_rank else 6) + 2 * again, traffic)


def _roofline(request: PlanRequest, device: Device, flops: float, moved: float) -> float:
    """Seconds of a token on all learners: its products, and what moves between them, at the share of the peaks that is assumed.

    Args:
        request: sizes.
        device: of every learner.
        flops: operations for a weight.
        moved: bytes of elementwise operations.
    """
    seconds = flops * request.shape.matmul_parameters / device.flops + moved / device.bandwidth
    return seconds / (ROOFLINE_SHARE * request.num_learners)


def elementwise_traffic(request: PlanRequest) -> float:
    """Bytes that unfused operations beside the products read and write for a token, in a pass that scores.

    Counted by operation: norms, residual sums, autocast's copies of each linear layer's input, rotary embeddings, gates.
    """
    shape, stream, computed = request.shape, request.stream_bytes, request.compute_bytes
    autocast = request.autocasts
    converted = 4 + stream if stream < 4 else 0  # norms compute in float32, and return what they were given
    norm = 20 + 2 * converted + (8 if stream >= 4 else 4)
    hidden = 2 * norm + 2 * (2 * stream + computed) + autocast * 5 * (stream + computed)
    given = stream if shape.qk_norm else computed
    rotated = 5 * given + 5 * stream + autocast * (stream + computed)
    head_norm = shape.qk_norm * (20 + 2 * (4 + computed) * (computed < 4) + computed + stream)
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    width = shape.hidden * hidden + heads * (rotated + head_norm) + 5 * computed * shape.intermediate
    return float(shape.layers * width)


def adapter_traffic(request: PlanRequest) -> float:
    """The same of adapters: each scales and adds an output, and under autocast converts its input."""
    if not request.lora_rank:
        return 0.0
    shape, computed = request.shape, request.compute_bytes
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs = query + 2 * key + 2 * shape.hidden + 2 * shape.intermediate
    inputs = 5 * shape.hidden + 2 * (query + shape.intermediate)
    converted = request.autocasts * (request.stream_bytes + computed) * inputs
    return float(shape.layers * (5 * computed * outputs + converted))


def learner_share(request: PlanRequest, device: Device) -> float:
    """Share of a device's peak that products of the learner's update reach, without attention and recomputation."""
    useful = (4 if request.lora_rank else 6) * request.shape.matmul_parameters
    return useful / (_updated_token(request, device) * request.num_learners * device.flops)


def iteration_range(phases: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of an iteration where the learner's kernels reach most and least of a device's peaks."""
    learner = ROOFLINE_SHARE * (phases["scoring"] + phases["update"])
    others = sum(phases.values()) - phases["scoring"] - phases["update"]
    return others + learner / MOST_SHARE, others + learner / LEAST_SHARE
