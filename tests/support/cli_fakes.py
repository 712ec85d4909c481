"""An algorithm without Ray actors, to test the flow of the command line; the real one is tested end to end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from trial_ray.evaluation.panel import Panel
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.rollout.trajectory import EpisodeResult

EXPERIMENT = """
from trial_ray.algorithms import TRIALConfig
config = (
    TRIALConfig()
    .environment("trial/ALFWorld-v0", env_config={"split": "train"})
    .policy(model_path="some/model")
    .training(hindsight_start_iteration=1)
    .panel(split="valid_seen", num_tasks=20)
)
stop = {"training_iteration": 3}
"""


class FakeAlgorithm:
    """Learns one task an iteration; counts what was done to it."""

    panels: ClassVar = {
        "ALFWorld-v0": (Panel("trial/ALFWorld-v0", "valid_seen", tuple(f"t{i}" for i in range(20))), None)
    }

    guards = SimpleNamespace(suspect=False)
    config = SimpleNamespace(num_learners=0, model_path="HuggingFaceTB/SmolLM2-135M-Instruct")

    def __init__(self, fail_at=None, error=None, on_train=None):
        self.iteration = 0
        self.stopped = False
        self.fail_at, self.error, self.on_train = fail_at, error, on_train

    def actors(self):
        return []

    def train(self):
        if self.on_train:
            self.on_train(self.iteration + 1)
        if self.iteration + 1 == self.fail_at:
            raise self.error
        self.iteration += 1
        return {
            "training_iteration": self.iteration,
            "env_runners": {"success_rate": 0.1 * self.iteration, "broken": float("nan")},
            "learners": {
                "default_policy": {
                    "grpo": {"surrogate_loss": -0.5},
                    "scoring": {"seconds": 0.0},
                    "update": {"seconds": 0.0, "tokens_trained": 100},
                }
            },
            "config": {"lr": 1.0},
        }

    def evaluate_panel(self, panel, entry):
        episodes = [
            EpisodeResult(f"t{i}", "look", i < 4 * self.iteration, float(i < 4 * self.iteration), 3, "terminated")
            for i in range(20)
        ]
        return EvaluationResult({"split": "valid_seen"}, episodes)

    def matmul_rate(self):
        return 1e9

    def actor_reports(self):
        return {"driver": {"host_bytes": 1 << 30, "device_bytes": None}, "engine 0": None}

    def save_to_path(self, path):
        Path(path, "rllib_checkpoint.json").write_text("{}")
        Path(path, "state.json").write_text(json.dumps({"iteration": self.iteration}))

    begin_saving = save_to_path

    def saving_finished(self):
        return True

    def restore_from_path(self, path):
        self.iteration = json.loads(Path(path, "state.json").read_text())["iteration"]

    def stop(self):
        self.stopped = True
