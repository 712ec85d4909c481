"""The built wheel in an empty virtual environment: everything a command needs is in it, without any checkout."""

import sys
import venv
from pathlib import Path

import pytest
import ray
from distributions import ROOT, copy_sources, files_of, run

USED = """
import trial_ray, trial_envs
from trial_ray.runs.experiment import experiment_file, load_experiment

load_experiment(experiment_file("alfworld_quickstart")).config.validate()
print(trial_ray.__file__, trial_envs.__file__, sep="\\n")
"""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_packages_of_the_wheel_have_their_files(tmp_path):
    source, prefix, pip = copy_sources(tmp_path / "source"), tmp_path / "prefix", f"{sys.executable} -m pip --quiet"
    build = f"{pip} wheel --no-deps --no-index --no-build-isolation --wheel-dir {tmp_path} {source}"
    run(build, folder=tmp_path)
    (wheel,) = tmp_path.glob("trial_ray-*.whl")
    venv.create(prefix, with_pip=False)
    (packages,) = prefix.glob("lib/python*/site-packages")
    # A folder on the path, whose own .pth files (such as that of an editable install) Python does not read.
    (packages / "others.pth").write_text(str(Path(ray.__file__).parents[1]))
    python = prefix / "bin/python"
    run(f"{pip} --python {python} install --no-deps --no-index {wheel}", folder=tmp_path)
    installed = [Path(file).parent for file in run(f"{python} -c", USED, folder=tmp_path).splitlines()[-2:]]
    for package, folder in zip(installed, (ROOT / "trial_ray", ROOT / "envs/trial_envs"), strict=True):
        assert package.parent == packages
        assert [file for file in files_of(folder) if not (package / file).is_file()] == []
