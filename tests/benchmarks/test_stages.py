"""Stages of the first hour on a GPU: each leaves its JSON, later calls go on, deadlines and failures stay with their stage."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time

import first_gpu_hour
import gpu
import gpu_venv
import psutil
import pytest
from first_gpu_hour import all_stages, run_stages, script, table_of
from rich.console import Console
from stages import FOLDER, SKIPPED_STATUS, Stage, source_digest, stage_environment

REPORT = """
import json, sys
from pathlib import Path
def report(name, **details):
    record = {"measures": [], "environment": {"gpu": None}, "details": details}
    Path(sys.argv[1], name + ".json").write_text(json.dumps(record))
"""


def fake(name, code, deadline_s=60.0):
    return Stage(name, (sys.executable, "-c", REPORT + code, FOLDER), deadline_s)


def calls_counted(name, counter):
    return fake(name, f"open({str(counter)!r}, 'a').write('{name} '); report({name!r}, rows=3)")


@pytest.fixture
def run(tmp_path):
    """Run stages as a call of the script does; returns their records and what it printed."""

    def run(*stages, **options):
        printed = io.StringIO()
        console = Console(file=printed, width=160)
        records = run_stages(stages, tmp_path / "out", "cpu", console, **options)
        console.print(table_of(records))
        on_disk = {stage.name: json.loads((tmp_path / "out" / f"{stage.name}.json").read_text()) for stage in stages}
        assert records == on_disk
        return records, printed.getvalue()

    return run


def test_a_call_goes_on_where_the_last_one_stopped(run, tmp_path, monkeypatch):
    counter = tmp_path / "calls"
    first, second, third = (calls_counted(name, counter) for name in ("first", "second", "third"))
    run(first)
    records, printed = run(first, second)
    assert counter.read_text().split() == ["first", "second"]
    assert "first: passed" in printed
    assert records["first"]["details"] == {"rows": 3}
    (tmp_path / "out" / "second.json").write_text('{"measures": [')  # cut
    run(first, second, third)
    assert counter.read_text().split() == ["first", "second", "second", "third"]
    run(second, again=True)
    assert counter.read_text().split()[4:] == ["second"]
    monkeypatch.setattr(first_gpu_hour, "source_digest", lambda: "of other code")
    run(first)
    assert counter.read_text().split()[5:] == ["first"]


def test_results_of_a_rehearsal_are_none_of_a_gpus(tmp_path):
    counter = tmp_path / "calls"
    stage = calls_counted("first", counter)
    for device in ("cpu", "cuda", "cuda"):
        run_stages([stage], tmp_path / "out", device, Console(file=io.StringIO()))
    assert counter.read_text().split() == ["first", "first"]


def test_results_belong_to_the_python_code_alone(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    code = tmp_path / "benchmarks" / "one.py"
    code.write_text("a = 1")
    before = source_digest(tmp_path)
    (tmp_path / "benchmarks" / "one.json").write_text("{}")
    assert source_digest(tmp_path) == before
    code.write_text("a = 2")
    changed = source_digest(tmp_path)
    code.rename(code.with_name("two.py"))
    assert len({before, changed, source_digest(tmp_path)}) == 3


def test_at_its_deadline_a_stage_ends_with_all_its_processes_and_keeps_what_it_measured(run, tmp_path, monkeypatch):
    pids, wait = tmp_path / "pids", subprocess.Popen.wait

    def wait_for_processes(process, timeout=None):
        """The deadline is there when both processes are."""
        if timeout != 3.0:
            return wait(process, timeout)
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_processes)
    # As Ray's: a process that leaves the group and ignores polite signals, with a child of its own.
    child = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child += "each = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    child += f"open({str(pids)!r}, 'a').write(str(each.pid) + ' '); time.sleep(600)"
    code = f"""
import subprocess, time
update = {{"seconds": 40.0, "steps_done": 10, "steps": 25, "expected_seconds": 100.0}}
report("endless", unfinished="update", phases={{"sampling": {{"seconds": 1.5}}}}, update=update)
each = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
open({str(pids)!r}, "a").write(str(each.pid) + " ")
time.sleep(600)
"""
    records, printed = run(fake("endless", code, deadline_s=3.0), fake("next", "report('next')"))
    about = records["endless"]["stage"]
    assert (about["status"], about["exit_status"], about["deadline_s"]) == ("deadline", None, 3.0)
    assert records["endless"]["details"]["phases"] == {"sampling": {"seconds": 1.5}}
    assert "3 s" in about["suggestion"]
    assert all(
        words in printed for words in ("sampling 1.5 s", "stopped during update", "10 of 25 steps, 100 s expected")
    )
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert records["next"]["stage"]["status"] == "passed"


def test_a_call_that_is_terminated_leaves_no_process_and_no_result(tmp_path):
    command = [*script("first_gpu_hour.py"), "--device", "cpu", "--out", str(tmp_path), "tests"]
    with (tmp_path / "printed").open("wb") as printed:
        call = subprocess.Popen(command, stdout=printed, stderr=printed, env=stage_environment())
    try:
        process, deadline = psutil.Process(call.pid), time.monotonic() + 60
        while not (stages := process.children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        call.terminate()
        assert call.wait(timeout=60) != 0
    finally:
        call.kill()
    assert [" ".join(each.cmdline()) for each in psutil.wait_procs(stages, timeout=10)[1]] == []
    assert stages
    assert not (tmp_path / "tests.json").exists()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("raise RuntimeError('CUDA out of memory. Tried to allocate')", "nvidia-smi"),
        ("sys.exit('fatal error: Python.h: No such file')", "python3-dev"),
        ("import no_such_package", "module no_such_package"),
        ("sys.exit('of another kind')", "failing.log"),
    ],
)
def test_a_failed_stage_says_what_to_do_and_the_next_one_runs(run, code, advice):
    records, printed = run(fake("failing", code), fake("next", "report('next')"))
    about = records["failing"]["stage"]
    assert (about["status"], about["exit_status"]) == ("failed", 1)
    assert advice in about["suggestion"]
    assert about["suggestion"].endswith("make first-gpu-hour ARGS=failing")
    assert about["output_tail"]
    assert about["output_tail"][-1] in printed
    assert records["failing"]["measures"] == []
    assert records["next"]["stage"]["status"] == "passed"
    assert records["next"]["stage"]["suggestion"] == ""


def test_what_a_machine_lacks_is_a_reason_and_no_failure(run):
    code = f"report('rare', reason='needs two GPUs'); sys.exit({SKIPPED_STATUS})"
    records, printed = run(fake("rare", code))
    assert records["rare"]["stage"]["status"] == "skipped"
    assert "needs two GPUs" in printed


TESTS = """
import json
import sys
from pathlib import Path

import pytest

def test_one():
    pass

def test_two():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="no such device")
def test_three():
    pass

def test_four():
    # Were this process killed now, its JSON would have the others.
    so_far = json.loads(Path(sys.argv[1]).read_text())["details"]
    assert so_far["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert [name.partition("::")[2] for name in so_far["not_run"]] == ["test_four"]
"""


def test_every_test_is_in_the_json_as_soon_as_it_has_ended(run, tmp_path):
    file = tmp_path / "test_few.py"
    file.write_text(TESTS)

    def recorded(name, *arguments):
        apart = (f"--rootdir={tmp_path}", "-c", "/dev/null", "-p", "no:hypothesispytest")
        return Stage(name, script("recorded_tests.py", f"{FOLDER}/{name}.json", *arguments, str(file), *apart), 100.0)

    records, printed = run(recorded("some"), recorded("none", "-k", "three"))
    details = records["some"]["details"]
    assert records["some"]["stage"]["status"] == "failed"
    outcomes = {name.partition("::")[2]: each["outcome"] for name, each in details["tests"].items()}
    assert outcomes == {"test_one": "passed", "test_two": "failed", "test_three": "skipped", "test_four": "passed"}
    assert details["not_run"] == []
    assert "one is not two" in next(each["message"] for name, each in details["tests"].items() if "two" in name)
    assert {"gpu", "packages", "commit"} <= set(records["some"]["environment"])
    assert "2 passed, 1 failed, 1 skipped" in printed
    assert records["none"]["stage"]["status"] == "skipped"
    assert records["none"]["details"]["reason"] == "no such device (1 tests)"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_stage_fits_into_ten_minutes_and_runs_what_there_is(device):
    stages = all_stages(device)
    assert all(stage.deadline_s < 600 for stage in stages)
    assert {stage.command[2] for stage in stages if "gpu.py" in stage.command[1]} == set(gpu.PARTS)
    assert [stage.name for stage in stages][:3] == ["environment", "tests", "conformance"]
    assert [stage.name for stage in stages][-1] == "step"


def test_an_environment_is_made_whole_or_not_at_all(tmp_path, capfd):
    wheels, python = tmp_path / "wheels", tmp_path / "venv" / "bin" / "python"
    wheels.mkdir()
    with pytest.raises(SystemExit, match="found no"):
        gpu_venv.make_venv(python, wheels)
    (wheels / "broken-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(SystemExit, match="was removed"):
        gpu_venv.make_venv(python, wheels)
    assert "broken" in capfd.readouterr().err
    assert not python.parent.parent.exists()
    python.parent.mkdir(parents=True)
    with pytest.raises(SystemExit, match="expected bin/python"):
        gpu_venv.make_venv(python, wheels)
    assert python.parent.exists()
