"""The distributions: built from a copy of the repository, checked, and installed into empty environments that play a game."""

import re
import sys

import pytest
from distributions import copy_sources, run

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


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return copy_sources(tmp_path_factory.mktemp("clone") / "source")


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
    return tmp_path / "venv/bin/python"


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
