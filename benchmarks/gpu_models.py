"""Models in the shapes of real ones with random weights, made-up trajectories, and clocks, for the parts of ``gpu.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from trial_ray.environments.alfworld import ADAPTER
from trial_ray.models.tiny import build_tokenizer
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

SMOLLM2, QWEN3, QWEN2_5 = "SmolLM2-135M", "Qwen3-1.7B", "Qwen2.5-1.5B"
_SHARED = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, int]]] = {
    SMOLLM2: (
        LlamaConfig,
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
    ),
    QWEN3: (
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    QWEN2_5: (
        Qwen2Config,
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
    ),
}
_SMALL = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True)
class Setup:
    """Where and how large.

    Attributes:
        device: of the measurements.
        small: the smallest sizes, at which figures mean nothing.
        progress: file to which a part that takes minutes writes its report so far; ``None``: nowhere.
    """

    device: torch.device
    small: bool
    progress: Path | None = None

    @property
    def cuda(self) -> bool:
        """Whether figures are of a GPU."""
        return self.device.type == "cuda"

    def model_config(self, name: str, **changes: Any) -> PretrainedConfig:
        """Configuration of a model of this shape, or of the smallest of its kind."""
        architecture, sizes = _SHAPES[name]
        small = _SMALL | _SMALL_HEADS if self.small else {}
        return architecture(**{**sizes, **_SHARED, "max_position_embeddings": 8192, **small, **changes})

    def save_model(self, folder: Path, name: str, **changes: Any) -> str:
        """Write the model with random weights and a tokenizer that uses few of its ids; returns the folder."""
        tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.model_config(name, **changes), dtype=torch.float32)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    def groups(self, vocabulary: int, tasks: int, turns: int, seed: int = 0) -> list[TrajectoryGroup]:
        """Groups of 8 rollouts (2 of the smallest) with prompts as in ALFWorld: about 700 tokens, of which 400 are the task's."""
        rng = np.random.default_rng(seed)
        rollouts, task_tokens, own, answer = (2, 24, 8, 4) if self.small else (8, 400, 300, 60)

        def ids(count: int) -> np.ndarray:
            return rng.integers(10, vocabulary, count).astype(np.int32)

        def turn(task: np.ndarray, context: np.ndarray) -> Turn:
            prompt, response = np.concatenate([task, context]), ids(answer)
            logprobs = np.zeros(answer, np.float32)
            return Turn(prompt, response, logprobs, 1, len(prompt) - 1, "", "look", True, "You look.", 0.0, "stop")

        groups = []
        for number in range(tasks):
            task, first = ids(task_tokens), ids(own)
            # All rollouts of a task begin with the same observation.
            played = [
                Trajectory(
                    f"task-{number}",
                    "pick",
                    index,
                    [turn(task, ids(own) if step else first) for step in range(turns)],
                    index % 2 == 0,
                )
                for index in range(rollouts)
            ]
            groups.append(TrajectoryGroup(f"task-{number}", played))
        return groups

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], repeats: int = 5) -> float:
        """Median of some calls after two that do not count."""
        if self.small:
            return self.once(function)
        for _ in range(2):
            function()
        return statistics.median(self.once(function) for _ in range(repeats))

    def once(self, function: Callable[[], Any]) -> float:
        """Seconds of one call, compilation included where it is the first."""
        self.wait()
        began = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - began

    def matmul_rate(self) -> float:
        """Floating-point operations a second of a large bfloat16 matrix product, what utilisation refers to."""
        size = 8192 if self.cuda else 512
        one, other = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: one @ other, repeats=20)
