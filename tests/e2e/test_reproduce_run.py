"""A comparison with real trials, in three pieces: the first runs out of time, the second is interrupted, the third ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import finished

from trial_ray.termination import INTERRUPTING

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

SCALE = """
from trial_ray.algorithms import TRIALConfig
from trial_ray.reproduction import EvaluationSet, Scale


def configure(environment, backbone):
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny", "num_games": 8, "max_turns": 2})
        .rl_module(model_path=MODEL)
        .training(group_size=2, tasks_per_iteration=4, kl_coeff=0.0, hindsight_start_iteration=1)
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
    environments={"alfworld": (EvaluationSet("generated"),)},
    backbones=("nano",),
    controlled_backbone="nano",
    iterations=5000,
    seeds=1,
)
"""


REPRODUCE = ("reproduce", "table3")


def trained_by_run(folder: Path) -> dict[str, int]:
    """Iterations in the metrics of every run."""
    return {path.parent.name: len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl")}


def test_a_comparison_goes_on_where_it_was_interrupted(model_path, tmp_path):
    scale, folder = tmp_path / "mine.py", tmp_path / "out"
    scale.write_text(SCALE.replace("MODEL", repr(model_path)))
    command = (*REPRODUCE, "--scale", scale, "--out", folder)
    before: dict[str, int] = {}
    for _ in range(2):
        most = max(before.values(), default=0)
        code, printed = finished(
            *command,
            interrupt_when=lambda: max(trained_by_run(folder).values(), default=0) > most,  # noqa: B023
        )
        assert code == 130, printed
        assert INTERRUPTING in printed
        assert "4 of 4 runs are unfinished; the same command continues them" in printed
        plan = json.loads((folder / "plan.json").read_text())
        trained = [run["trained"] for run in plan["runs"]]
        assert plan["iterations_left"] == 4 * 5000 - sum(trained)
        assert all(run["state"] == "unfinished" for run in plan["runs"] if run["trained"])
        assert max(trained) > most
        before = trained_by_run(folder)
    for name, count in before.items():
        saved = sorted(int(path.name) for path in (folder / "runs" / name / "checkpoints").iterdir())
        assert saved[-1] == count  # no iteration is lost

    enough = max(trained) + 1
    code, printed = finished(*REPRODUCE, "--scale", scale, "--out", folder, "--iterations", enough)
    assert code == 0, printed
    plan = json.loads((folder / "plan.json").read_text())
    assert {(run["state"], run["trained"]) for run in plan["runs"]} == {("done", enough)}
    for run in plan["runs"]:
        lines = (folder / "runs" / run["run"] / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["iteration"] for line in lines] == list(range(1, enough + 1))
    table = json.loads((folder / "table3.json").read_text())
    assert len(table["runs"]) == 4
