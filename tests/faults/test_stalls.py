"""Processes that hang while a run waits for them: the run says so, ends them and goes on."""

from __future__ import annotations

import signal

import pytest
from faulty_env import CountingEnv
from faulty_run import FaultyRun, send, tiny_config
from user_env import registered

from trial_ray.algorithms.run_actors import ENGINE, ENV_RUNNER

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(1800)]
STALL_S = 45.0


def test_an_engine_and_an_env_runner_that_hang_are_replaced(model_path, tmp_path, tell):
    with registered(CountingEnv):
        run = FaultyRun(tmp_path / "run", tiny_config(model_path, stall_timeout_s=STALL_S), 3)
        stop = signal.SIGSTOP
        seconds = run.run_with((1, "sampling", 2, send(ENGINE, stop)), (1, "sampling", 3, send(ENV_RUNNER, stop)))
    printed = run.printed.getvalue()
    print(printed)
    assert len(run.algorithms) == 1
    assert f"no progress for {STALL_S:g} s (sampling); ending engine 0, so that" in printed
    assert f"no progress for {STALL_S:g} s (sampling); ending env runner 1, so that" in printed
    assert "restart" not in printed
    reports = sorted((run.folder.path / "logs").glob("stall-*.txt"))
    of_engine, of_runner = (report.read_text() for report in reports)
    assert "sample_groups" in of_engine.partition("--- env runner 1\n")[2]
    assert "engine 0: process" in of_engine
    assert "stopped, does not answer" in of_engine
    assert "none: the process is stopped" in of_runner.partition("--- env runner 1\n")[2].partition("\n---")[0]
    assert "_sample" in of_runner.partition("--- driver")[2].partition("\n---")[0]
    assert run.folder.state() == "done"
    for kind, each in zip(("engine", "env runner"), seconds, strict=True):
        tell(
            f"SIGSTOP of the only {kind}, stall_timeout_s={STALL_S:g}",
            "sampling",
            "replaced; goes on",
            each,
            run.lost(),
        )
