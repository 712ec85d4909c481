"""The distributions: built from a copy of the repository, checked, and installed into empty environments that play a game."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "trial_ray", "envs", "tuned_examples")
PLAY = """
import sys
import gymnasium
import trial_envs

assert "site-packages" in trial_envs.__file__, trial_envs.__file__
name = sys.argv[1]
settings = {"level": 1} if name == "TextWorld" else {"split": "generated"}
env = gymnasium.make(f"trial/{name}-v0", **settings)
observation, info = env.reset(seed=0)
for action in env.unwrapped.walkthrough:
    observation, reward, terminated, truncated, info = env.step(action)
assert terminated and info["won"]
env.close()
print("won")
"""


def run(line, *arguments, folder):
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*line.split(), *arguments], cwd=folder, env=own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a copy of the files that a build reads, because a build writes into its source."""
    folder = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            )
        else:
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def dist(clone):
    """Return the folder with the source distributions and the wheels that are built from them."""
    folder = clone / "dist"
    for source in (clone / "envs", clone):
        run(f"{sys.executable} -m build --no-isolation --outdir {folder} {source}", folder=clone)
    assert len(list(folder.iterdir())) == 4
    return folder


@pytest.fixture
def empty(tmp_path):
    """Return the Python of an environment with only pip."""
    run(f"{sys.executable} -m venv {tmp_path}/venv", folder=tmp_path)
    return tmp_path / "venv" / "bin" / "python"


def test_metadata_and_contents_are_complete(clone, dist):
    run(f"{sys.executable} -m twine check --strict", *dist.iterdir(), folder=clone)
    run(f"{sys.executable} -m check_wheel_contents", *dist.glob("*.whl"), folder=clone)
    versions = {re.search(r"-(\d+\.\d+\.\d+)", file.name)[1] for file in dist.iterdir()}
    assert len(versions) == 1


@pytest.mark.parametrize("kind", [".whl", ".tar.gz"])
@pytest.mark.parametrize(
    ("name", "extra"),
    [("ALFWorld", "alfworld"), ("TextWorld", "textworld"), ("WebShop", "webshop"), ("SearchQA", "search-qa")],
)
def test_an_environment_installs_with_its_extra_alone_and_plays(dist, empty, tmp_path, name, extra, kind):
    (file,) = dist.glob(f"trial_envs*{kind}")
    run(f"{empty} -m pip install --quiet {file}[{extra}]", folder=tmp_path)
    assert run(f"{empty} -c", PLAY, name, folder=tmp_path).strip() == "won"
    assert "torch" not in run(f"{empty} -m pip list", folder=tmp_path)
