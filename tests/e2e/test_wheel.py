"""The built wheel in an empty virtual environment: everything a command needs is in it, without any checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]
PACKAGED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "trial_ray", "envs", "tuned_examples")
OWN = """
from trial_ray.runs.experiment import experiment_file, load_experiment

config = load_experiment(experiment_file("alfworld_quickstart")).config.training(group_size=2)
stop = {"training_iteration": 1}
"""
SMALL = (
    "engine=transformers", "num_env_runners=0", "tasks_per_iteration=2", "group_size=2", "env_config.num_games=8",
    "env_config.max_turns=2", "evaluation_num_tasks=2", "evaluation_env_config.num_games=2", "hindsight_start_iteration=1",
)  # fmt: skip

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder of the programs of a virtual environment with the wheel, and with the other packages of this one."""
    source, wheels, prefix = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "prefix"))
    for name in PACKAGED:  # a build writes into its source
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", wheels, source)
    (wheel,) = wheels.glob("trial_ray-*.whl")
    venv.create(prefix, with_pip=False)
    (packages,) = prefix.glob("lib/python*/site-packages")
    # A folder on the path, whose own .pth files (such as that of an editable install) Python does not read.
    (packages / "others.pth").write_text(str(Path(ray.__file__).parents[1]))
    pip("--python", prefix / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    return prefix / "bin"


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)


@pytest.fixture
def call(installed, tmp_path) -> Callable[..., str]:
    """Function that runs a program of the environment in an empty folder and returns its output."""

    def run(program: str, *arguments: object) -> str:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
        # Ray's sockets live under this folder, and their paths must stay short.
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
            done = subprocess.run(
                [installed / program, *map(str, arguments)],
                env={**own, "RAY_TMPDIR": folder, "COLUMNS": "200"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=600,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_packages_of_the_wheel_have_their_files(call, installed):
    printed = call(
        "python",
        "-c",
        "import trial_ray, trial_envs; print(trial_ray.__file__, trial_envs.__file__, sep='\\n')\n"
        "from trial_ray.sweeps.study import load_scale\n"
        "from trial_ray.evaluation.evaluation_sets import evaluation_set_names, read_evaluation_set\n"
        "from trial_ray.algorithms.methods import method_names\n"
        "print(*(load_scale(name).iterations for name in ('tiny', 'small', 'paper')))\n"
        "print(*(len(read_evaluation_set(name)) for name in evaluation_set_names()[3:]))\n"
        "print(len(method_names()))\n",
    ).splitlines()
    assert [Path(file).is_relative_to(installed.parent) for file in printed[:2]] == [True, True]
    assert printed[2:] == ["12 60 150", "128 128 128", "12"]
    packages = Path(printed[0]).parents[1]
    assert [(packages / name / "py.typed").is_file() for name in ("trial_ray", "trial_envs")] == [True, True]
    for folder in ("trial_ray", "tuned_examples"):
        sources = {file.relative_to(ROOT / folder) for file in (ROOT / folder).rglob("*.py")}
        inside = packages / "trial_ray" / ("tuned_examples" if folder == "tuned_examples" else "")
        assert {file for file in sources if not (inside / file).is_file()} == set()


@pytest.mark.long
def test_commands_plan_without_a_checkout(call):
    assert "20 runs of 12" in call("trial-ray", "sweep", "table3", "--dry-run")
    checks = call("trial-ray", "doctor")
    assert "trial-ray from an installed package" in " ".join(checks.split())
    assert "make setup" not in checks
    assert "key-value cache" in call("trial-ray", "plan", "alfworld_qwen3_1.7b", "--gpus", 8, "--gpu-memory", 80)


@pytest.mark.long
def test_own_experiment_trains_the_policy_of_the_wheel(call, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = [part for setting in SMALL for part in ("--set", setting)]
    run = tmp_path / "run"
    call("trial-ray", "train", "own.py", "--iterations", 1, "--out", run, *settings)
    assert [len(list((run / "evaluations").glob(name))) for name in ("before.json", "after_*.json")] == [1, 1]
    assert (run / "checkpoints" / "000001").is_dir()
    call("trial-ray", "inspect", run)
    assert (run / "viewer" / "index.html").is_file()
