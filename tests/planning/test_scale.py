"""Simulated runs on numbers of GPUs: who gets them, which part is the limit, and the command that shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_simulation import workload

from trial_ray import cli
from trial_ray.cli import simulation
from trial_ray.errors import ConfigError
from trial_ray.planning.rates import Arrangement, Workload
from trial_ray.planning.request import PlanRequest
from trial_ray.planning.scale import NODE_BYTES_PER_S, Scaling, device_rates, knee, limit, loss_cost, points, scaled
from trial_ray.planning.step_time import gpu_like
from trial_ray.runs.experiment import load_experiment

ROOT = Path(__file__).parents[2]
QWEN3 = ROOT / "tuned_examples" / "alfworld_qwen3_1.7b.py"


@pytest.fixture(scope="module")
def scaling() -> Scaling:
    """A short run, whose engines and learners have GPUs of their own."""
    config = load_experiment(QWEN3).config.copy(copy_frozen=False)
    config.engines(colocate=False, num_gpus_per_engine=1).learners(num_gpus_per_learner=1)
    config.training(tasks_per_iteration=4, group_size=4)
    request = replace(PlanRequest.of(config), max_turns=6)
    lengths = Workload.assumed(request, seed=0)
    rates = device_rates(request, gpu_like(80), lengths)
    return Scaling(request, lengths, Arrangement.of(config, 2), rates, iterations=3, node_mtbf_s=100 * 3600.0)


def test_gpus_are_used_up_and_never_exceeded(scaling):
    for gpus in (2, 3, 8, 32):
        for each in points(scaling, gpus):
            assert each.gpus <= gpus
            assert each.arrangement.engines + each.arrangement.learners == each.gpus
            assert each.arrangement.max_staleness == (0 if each.kind == "synchronous" else 1)


def test_one_gpu_holds_both_only_where_they_take_turns(scaling):
    assert points(scaling, 1) == []
    turns = replace(scaling, arrangement=replace(scaling.arrangement, colocate=True))
    [only] = points(turns, 1)
    assert (only.kind, only.arrangement.engines, only.arrangement.learners) == ("synchronous", 1, 1)


def test_more_gpus_help_until_they_do_not(scaling):
    seconds = {gpus: {each.kind: each.iteration_s for each in points(scaling, gpus)} for gpus in (2, 8, 64)}
    for kind in ("synchronous", "overlapped"):
        assert seconds[8][kind] < 0.8 * seconds[2][kind]
        assert seconds[64][kind] > 0.7 * seconds[8][kind]
    found = [each for gpus in (2, 4, 8, 16, 32, 64, 128) for each in points(scaling, gpus, ["overlapped"])]
    at = knee(found)
    assert at is not None
    assert 2 < at.gpus <= 64


def test_overlapped_iterations_are_shorter_than_synchronous_ones(scaling):
    found = {each.kind: each for each in points(scaling, 16)}
    assert found["overlapped"].iteration_s < found["synchronous"].iteration_s
    assert found["elastic"].run == found["overlapped"].run


@pytest.mark.parametrize(
    ("slow", "part"),
    [
        ({"environment_s": 60.0}, "environments and env runners"),
        ({"sync_s": 600.0}, "weight sync"),
        ({"step_s": 600.0}, "optimizer and exchange of gradients"),
        ({"update_token_s": 1.0}, "learners' passes"),
    ],
)
def test_the_limit_is_the_part_that_was_made_slow(scaling, slow, part):
    slowed = replace(scaling, rates=replace(scaling.rates, **slow))
    [at] = points(slowed, 8, ["synchronous"])
    assert limit(slowed, at) == part


def test_an_exchange_of_gradients_and_the_way_to_the_nodes_cost_with_their_number(scaling):
    few, many = (scaled(scaling, replace(scaling.arrangement, learners=number, engines=number)) for number in (1, 64))
    assert few.sync_s == scaling.rates.sync_s
    weights = scaling.request.shape.parameters * scaling.request.engine_bytes
    assert many.sync_s == pytest.approx(few.sync_s + 3 * weights / NODE_BYTES_PER_S)  # 8 nodes: three rounds
    assert many.step_s > few.step_s


def test_losses_of_nodes_are_dearer_for_runs_that_wait(scaling):
    spot = replace(scaling, node_mtbf_s=2 * 3600.0)
    found = {each.kind: each.losses.iteration_s / each.iteration_s for each in points(spot, 64)}
    assert 1 < found["elastic"] < found["overlapped"]
    [at] = points(scaling, 8, ["synchronous"])
    engine, runner = (loss_cost(scaling, at, kind) for kind in ("engine", "env runner"))
    assert engine.groups == 0 < engine.requests
    assert runner.groups > 0 == runner.requests
    assert min(engine.seconds, runner.seconds) > 0


def test_a_run_without_gpus_is_not_simulated_on_a_number_of_them():
    config = load_experiment(ROOT / "tuned_examples" / "alfworld_quickstart.py").config
    request = PlanRequest.of(config)
    lengths = workload()
    rates = device_rates(request, gpu_like(80), lengths)
    with pytest.raises(ConfigError, match="asks for no GPUs"):
        points(Scaling(request, lengths, Arrangement.of(config, 2), rates, 2, 1e6), 8)


def test_the_assumed_lengths_have_the_planners_means():
    request = PlanRequest.of(load_experiment(QWEN3).config)
    lengths = Workload.assumed(request, seed=1)
    assert lengths.num_turns == pytest.approx(0.6 * request.max_turns, rel=0.05)
    assert lengths.tokens.prompt == pytest.approx(0.45 * request.max_prompt_tokens, abs=1)
    assert lengths.tokens.response == pytest.approx(0.2 * request.max_response_tokens, rel=0.05)


# -- the command -------------------------------------------------------------------------------------------------------

SMALL = ["--set", "tasks_per_iteration=2", "--set", "group_size=4", "--set", "env_config.max_turns=5"]


def test_the_command_simulates_prints_draws_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulation, "LARGEST", 8)
    picture, figures = tmp_path / "scaling.png", tmp_path / "figures.json"
    files = ["--picture", str(picture), "--json", str(figures)]
    command = ["plan", str(QWEN3), "--simulate", "--gpus", "16", "--gpu-memory", "80", "--price", "2", *files, *SMALL]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    for words in ("synchronous", "elastic", "best checkpoint interval", "limited by", "cost of 1,000 episodes", "idle"):
        assert words in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(figures.read_text())
    assert {each["kind"] for each in record["points"]} == {"synchronous", "overlapped", "elastic"}
    assert record["points"][0]["cost_per_1000"] == pytest.approx(2 * record["points"][0]["gpu_hours_per_1000"])
    assert [each["gpus"] for each in record["curve"]["overlapped"]] == [2, 4, 8]


def test_a_run_without_gpus_is_simulated_as_configured(capsys):
    assert cli.main(["plan", "alfworld_quickstart", "--simulate", *SMALL]) == 0
    assert "as configured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--price", "2"], "--price needs --simulate"),
        (["--simulate", "--price", "0"], "--price is 0, expected a finite number above 0"),
        (["--simulate", "--node-hours", "nan"], "--node-hours is nan"),
        (["--simulate", "--picture", "scaling.pdf"], "ends in .png or .svg"),
        (["--simulate", "--recorded", "nowhere"], "is not a run folder"),
        (["--simulate", "--gpus", "1", "--set", "colocate=False"], "1 GPU cannot hold an engine and a learner"),
    ],
)
def test_wrong_arguments_are_told(arguments, words, capsys):
    assert cli.main(["plan", str(QWEN3), *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_help_names_the_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("--simulate", "--recorded", "--node-hours", "--price", "--picture"))
