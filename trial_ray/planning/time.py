"""Prediction of an iteration's time by phase from floating-point operations; and the peak performances of known GPUs."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from trial_ray.planning.memory import GIB, PlanRequest
from trial_ray.prompts.teacher_context import FRAMES

TURNS_SHARE, PROMPT_SHARE, RESPONSE_SHARE = 0.6, 0.45, 0.2
"""Assumed ratios of mean to maximum numbers: turns of a rollout, tokens of a prompt, and tokens of a response. With the TRIAL
paper's limits, these ratios give 3.9 million tokens per iteration; a published run of the paper had 3.83 million."""
_CONVERSATION = (2.33, 2.19)
SHARED_PREFIXES = {"tagged": (1.21, 1.11), "conversation": _CONVERSATION, "tools": _CONVERSATION, "plain": (2.2, 2.2)}
"""Ratios of the tokens of all turns to the tokens that the learner computes, by prompt style: first in scoring, then in
minibatches of an update. They are above 1 because the learner computes shared prefixes once. ``tagged`` and ``conversation``
were measured in the games of ALFWorld's official release, with half of the actions random (``benchmarks/bench_prefixes.py``),
``plain`` in the quickstart. ``tools`` is an assumption."""
EVIDENCE_SHARE = 0.3
"""Tokens that the learner computes in addition when it also scores the turns with their teacher contexts, as a share of the
tokens that it computes for the turns alone; measured by ``benchmarks/bench_prefixes.py`` with tagged prompts and contexts at the
end of the user's message. If the context is in front of the prompt, no prefix is shared, and the share is 1."""
LEARNER_SHARE, MIN_LEARNER_SHARE, MAX_LEARNER_SHARE = 0.25, 0.15, 0.4
"""Assumed share of a device's peak that matrix products in the learner's passes reach, with its lower and upper bound."""
OPTIMIZER_TRAFFIC = 54
"""Bytes moved per parameter in an optimizer step (finiteness flags, clipping, AdamW); traced with float32 weights."""
PREFILL_UTILISATION = 0.4
BANDWIDTH_UTILISATION = 0.6
DECODE_OVERHEAD_S = 0.005
"""Seconds of a decoding step in addition to its arithmetic and memory traffic."""
CACHED_SHARE = 0.5
"""Assumed share of prompt tokens that the engine finds in its prefix cache."""
ENVIRONMENT_STEP_S = 0.01
HOST_BANDWIDTH = 10e9
"""Bytes per second that a CPU reads from memory; an assumption."""
SYNC_BYTES_PER_S = 1e9
"""Bytes per second of the weight transfer from the learner through the object store into an engine, including checksums."""


@dataclass(frozen=True)
class Device:
    """A CPU or GPU and its peak performance.

    Attributes:
        name: display name; for a GPU, the name in the Ray resource ``accelerator_type:...``.
        flops: operations per second of dense matrix products, in bfloat16 on a GPU (float16 if it does not support bfloat16).
        bandwidth: bytes per second that are read from its memory.
        gib: memory in GiB.
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
"""GPUs with their published peaks (those of the SXM variant if a GPU has one) and the memory available to a process."""


def gpu_like(gib: float, name: str = "") -> Device:
    """Return the entry of :data:`GPUS` with a GPU's name; if several entries or none have it, the one with the nearest memory.

    Args:
        gib: memory of the GPU in GiB.
        name: name reported by the driver; empty if only the memory is given.
    """
    words = re.findall(r"\w+", name)
    matches = [device for device in GPUS if device.name.split("-")[0] in words]
    return min(matches or GPUS, key=lambda device: abs(device.gib - gib))


@dataclass(frozen=True)
class InstalledGPU:
    """An NVIDIA GPU of this host: name, memory in MiB and version of the driver."""

    name: str
    mib: int
    driver: str


def installed_gpus() -> tuple[list[InstalledGPU], str]:
    """Return the NVIDIA GPUs of this host, and the reason if the driver lists none. Both are empty without ``nvidia-smi``."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as error:
        return [], f"nvidia-smi failed: {error}"
    rows = re.findall(r"^(.+), (\d+), (\d+\..*)$", done.stdout, re.MULTILINE)
    printed = " ".join(done.stdout.split()) or "it printed nothing"
    gpus = [InstalledGPU(name, int(mib), driver) for name, mib, driver in rows]
    return gpus, "" if gpus else f"nvidia-smi lists no GPU: {printed}"


def gpu_bytes(cluster_resources: Mapping[str, float]) -> float | None:
    """Return the memory of the largest GPU found on this host or among Ray's nodes; ``None`` if none is found.

    A run is rejected only if it fits none of these GPUs, so the largest one decides.
    """
    known = [gpu.gib * GIB for gpu in GPUS if f"accelerator_type:{gpu.name}" in cluster_resources]
    return max([*(gpu.mib * 2**20 for gpu in installed_gpus()[0]), *known], default=None)


def step_time(request: PlanRequest, device: Device) -> tuple[dict[str, float], float]:
    """Predict the seconds of each phase of an iteration, and the number of tokens in the iteration's turns.

    Evaluations are not included. The prediction assumes that every learner and engine uses a GPU or CPU like ``device``, and
    that phases do not overlap.
    """
    turns = max(1.0, TURNS_SHARE * request.max_turns)
    prompt, response = PROMPT_SHARE * request.max_prompt_tokens, max(1.0, RESPONSE_SHARE * request.max_response_tokens)
    tokens = request.trajectories * turns * (prompt + response)
    steps = math.ceil(request.trajectories * turns / request.minibatch_rows)
    moved = OPTIMIZER_TRAFFIC * request.trained_parameters
    optimizer = moved / (request.shards * device.bandwidth * BANDWIDTH_UTILISATION)
    scored, updated = SHARED_PREFIXES[request.prompt_style]
    # The policy also scores the prompts with teacher contexts, unless a teacher with weights of its own scores them.
    context = request.teacher_context
    if request.teacher_share or request.teacher_sync_iterations is not None:
        context = None
    context_share = 0.0 if context is None else 1.0 if FRAMES[context].in_front else EVIDENCE_SHARE
    # ``score`` is the number of operations per weight and token in the scoring passes of policy, teacher and reference models;
    # ``update`` is the number in one epoch of the update.
    score = 2 * (1 + context_share + request.teacher_share + request.num_references + (request.lora_rank > 0))
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
    """Predict the seconds of the rollouts; if an engine has more requests than it decodes at a time, it decodes them in waves.

    A decoding step takes the time to read weights and cache or the time of its computation, whichever is longer.
    """
    shape, split, requests = request.shape, request.tensor_parallel_size, request.requests_per_engine
    batch = min(request.max_rows, requests)
    waves = math.ceil(requests / batch)
    prefilled = 2 * shape.matmul_parameters / split / (device.flops * PREFILL_UTILISATION)
    cached = batch * (prompt + response) * shape.kv_elements_per_token
    traffic = (shape.parameters + cached) * request.engine_bytes / (device.bandwidth * BANDWIDTH_UTILISATION)
    decoded = max(traffic / split, batch * prefilled) + DECODE_OVERHEAD_S
    prefill = requests * turns * prompt * (1 - CACHED_SHARE) * prefilled
    return waves * turns * response * decoded + prefill + waves * turns * ENVIRONMENT_STEP_S


def iteration_range(phases: Mapping[str, float]) -> tuple[float, float]:
    """Return an iteration's seconds at the highest and at the lowest assumed utilisation of the learner's devices."""
    learner = phases["scoring"] + phases["update"]
    others = sum(phases.values()) - learner
    return others + learner * LEARNER_SHARE / MAX_LEARNER_SHARE, others + learner * LEARNER_SHARE / MIN_LEARNER_SHARE
