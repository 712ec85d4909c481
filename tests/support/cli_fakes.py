"""An algorithm without Ray actors, to test the flow of the command line; the real one is tested end to end."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.trajectory import EpisodeResult

EXPERIMENT = """
from trial_ray.algorithms import TRIALConfig
config = (
    TRIALConfig()
    .environment("trial/ALFWorld-v0", env_config={"split": "train"})
    .rl_module(model_path="some/model")
    .training(hindsight_start_iteration=1)
    .evaluation(evaluation_split="valid_seen", evaluation_num_tasks=20)
)
stop = {"training_iteration": 3}
"""


class FakeAlgorithm:
    """Solves a fifth more of its tasks in each iteration.

    Args:
        on_train: called with the number of every iteration that starts.
        tasks: number of tasks of every evaluation set; 0: there are no evaluation sets.
        environments: names of the environments with an evaluation set.
    """

    health_checks = SimpleNamespace(suspect=False)
    config = SimpleNamespace(num_learners=0, model_path="HuggingFaceTB/SmolLM2-135M-Instruct")
    iteration = 0
    stopped = False

    def __init__(self, on_train=None, tasks=20, environments=("ALFWorld-v0",)):
        names = tuple(f"t{index}" for index in range(tasks))
        self.evaluation_sets = {
            name: (EvaluationSet("trial/ALFWorld-v0", "valid_seen", names), None) for name in environments if tasks
        }
        self.chat_template = {"digest": "0123456789abcdef", "kwargs": {}}
        self.on_train = on_train

    def actors(self):
        return []

    def train(self):
        if self.on_train:
            self.on_train(self.iteration + 1)
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
        }

    def evaluation_protocol(self, evaluation_set, entry):
        return {"split": evaluation_set.split, "num_tasks": len(evaluation_set)}

    def evaluate_set(self, evaluation_set, entry):
        won = len(evaluation_set) // 5 * self.iteration
        episodes = [
            EpisodeResult(task, "look", index < won, float(index < won), 3, "terminated")
            for index, task in enumerate(evaluation_set.task_ids)
        ]
        return EvaluationResult(self.evaluation_protocol(evaluation_set, entry), episodes)

    def take_faults(self):
        return ""

    def matmul_rate(self):
        return 1e9

    def timeline(self):
        return None

    def actor_reports(self):
        return {"driver": {"host_bytes": 1 << 30, "device_bytes": None}, "engine 0": None}

    def save_to_path(self, path):
        Path(path, "rllib_checkpoint.json").write_text("{}")
        Path(path, "state.json").write_text(json.dumps({"iteration": self.iteration}))

    def restore_from_path(self, path):
        self.iteration = json.loads(Path(path, "state.json").read_text())["iteration"]

    def stop(self):
        self.stopped = True


def interrupting(at):
    """Return a function for ``on_train`` that sends Ctrl-C when an iteration starts."""
    return lambda iteration: iteration == at and os.kill(os.getpid(), signal.SIGINT)


def failing(*errors):
    """Return a function for ``on_train`` that raises the next of the errors whenever the third iteration begins."""
    left = iter(errors)

    def on_train(iteration):
        if iteration == 3 and (error := next(left, None)):
            raise error

    return on_train


def noting_tracker(calls):
    """Return a tracker that appends its calls to a list."""

    class Notes:
        def __init__(self, run):
            self.name = run.name
            calls.append((run.name, run.group, run.resumed, run.settings["settings"]["lr"]))

        def log(self, iteration, metrics):
            calls.append((self.name, iteration, metrics["training_iteration"]))

        def close(self, state):
            calls.append((self.name, state))

    return Notes


def read(path):
    """Return the JSON value in a file."""
    return json.loads(path.read_text())


def names(folder):
    """Return the names in a folder, in alphabetical order."""
    return sorted(path.name for path in folder.iterdir())


def iterations(folder):
    """Return the iterations whose metrics a run has recorded."""
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
