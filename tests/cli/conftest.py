"""``trial-ray train`` without actors."""

import shlex
from contextlib import nullcontext

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm

from trial_ray import GRPOConfig, cli


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Function that runs ``trial-ray train`` into ``train.out`` with a fake algorithm, ``train.algorithm``.

    The first argument may be the number of iterations; the others are words of a shell. ``train.resume`` continues the run."""
    from trial_ray.algorithms import startup

    file = tmp_path / "experiment.py"
    file.write_text(EXPERIMENT)
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", lambda show: nullcontext())
    # The experiment's model and games do not exist.
    monkeypatch.setattr(startup, "require_inputs", startup.require_initial_policy)
    monkeypatch.setattr("trial_ray.reports.page.chart_svg", lambda chart: "<svg/>")  # drawn in tests/reports

    def call(*arguments, code=0, build_error=None, **fake):
        def build(config):
            if build_error:
                raise build_error
            call.config = config
            call.algorithm = FakeAlgorithm(**fake)
            return call.algorithm

        monkeypatch.setattr(GRPOConfig, "build_algo", build)
        if arguments and isinstance(arguments[0], int):
            arguments = ("--iterations", *arguments)
        line = " ".join(map(str, ("train", file, *arguments)))
        if "--out" not in line and "--resume" not in line:
            line += f" --out {call.out}"
        assert cli.main(shlex.split(line)) == code

    call.resume = lambda *arguments, **fake: call(*arguments, "--resume", call.out, **fake)
    call.out = tmp_path / "run"
    call.file = file
    return call
