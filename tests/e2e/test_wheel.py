"""The built wheel in an empty virtual environment: everything a command needs is in it, without any checkout."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]
PACKAGED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "trial_ray", "envs", "tuned_examples")
USED = """
import trial_ray, trial_envs
from trial_ray.runs.experiment import experiment_file, load_experiment

load_experiment(experiment_file("alfworld_quickstart")).config.validate()
print(trial_ray.__file__, trial_envs.__file__, sep="\\n")
"""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def run(*words, **options):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    return subprocess.check_output(words, text=True, timeout=300, env=own, **options)


def test_packages_of_the_wheel_have_their_files(tmp_path):
    source, prefix, pip = tmp_path / "source", tmp_path / "prefix", (sys.executable, "-m", "pip", "--quiet")
    for name in PACKAGED:  # a build writes into its source
        (source / name).parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, source / name)
    run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path, source)
    (wheel,) = tmp_path.glob("trial_ray-*.whl")
    venv.create(prefix, with_pip=False)
    (packages,) = prefix.glob("lib/python*/site-packages")
    # A folder on the path, whose own .pth files (such as that of an editable install) Python does not read.
    (packages / "others.pth").write_text(str(Path(ray.__file__).parents[1]))
    python = prefix / "bin/python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    installed = [Path(file).parent for file in run(python, "-c", USED, cwd=tmp_path).splitlines()[-2:]]
    for package, folder in zip(installed, (ROOT / "trial_ray", ROOT / "envs/trial_envs"), strict=True):
        assert package.parent == packages
        files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
        files = [file for file in files if "__pycache__" not in file.parts]
        assert [file for file in files if not (package / file).is_file()] == []
