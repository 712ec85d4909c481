"""A study with real trials: interrupted, then continued to its table."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from commands import finished

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ITERATIONS = 6
SCALE = """
from trial_ray.algorithms import TRIALConfig
from trial_ray.sweeps.study import EvaluationSplit, Scale

ITERATIONS = 6


def configure(environment, backbone):
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny", "num_games": 8, "max_turns": 2})
        .rl_module(model_path=MODEL)
        .training(group_size=2, tasks_per_iteration=4, ref_kl_coeff=0.0, hindsight_start_iteration=1)
        .env_runners(max_prompt_tokens=400, max_response_tokens=4, prompt_style="plain")
        .engines(engine="transformers", num_cpus_per_engine=0.25)
        .env_runners(num_env_runners=0)
        .learners(num_learners=0, num_cpus_per_learner=0.25)
        .resources(num_cpus_for_main_process=0.5)
        .evaluation(evaluation_split="generated", evaluation_env_config={"num_games": 4, "generator_seed": 7})
    .evaluation(evaluation_num_tasks=4)
    )


scale = Scale(
    configure=configure,
    environments={"alfworld": (EvaluationSplit("generated"),)},
    backbones=("nano",),
    controlled_backbone="nano",
    iterations=ITERATIONS,
    seeds=1,
)
"""


def trained(folder: Path) -> dict[str, list[int]]:
    """Return the iterations in the metrics of every run."""
    files = folder.glob("*/metrics.jsonl")
    return {
        file.parent.name: [json.loads(line)["iteration"] for line in file.read_text().splitlines()] for file in files
    }


def test_interrupted_study_continues_to_its_table(model_path, tmp_path):
    scale, folder = tmp_path / "mine.py", tmp_path / "out"
    scale.write_text(SCALE.replace("MODEL", repr(model_path)))
    command = ("sweep", "pair", "--scale", scale, "--out", folder)
    code, printed = finished(*command, interrupt_when=lambda: any(trained(folder).values()))
    assert code == 130, printed
    assert "continue with the same command" in printed
    code, printed = finished(*command)
    assert code == 0, printed
    runs = {f"alfworld-nano-{method}-seed0" for method in ("grpo", "trial")}
    assert trained(folder) == {name: [*range(1, ITERATIONS + 1)] for name in runs}
    for name in runs:
        assert json.loads((folder / name / "run.json").read_text())["state"] == "done"
        (played,) = (folder / name / "evaluations").glob("*.json")
        assert played.name == f"generated-full_{ITERATIONS:06d}.json"
    cells = pandas.read_csv(folder / "pair.csv")
    assert {*cells["method"]} == {"grpo", "trial"}
    assert {*cells["seeds"]} == {1}
    assert {path.name for path in (folder / "figures" / "alfworld-nano").glob("*.png")} >= {"success.png"}
    assert (folder / "report.html").is_file()
    # A finished study writes its tables again without Ray.
    (folder / "pair.csv").unlink()
    code, printed = finished(*command)
    assert code == 0, printed
    assert (folder / "pair.csv").is_file()
