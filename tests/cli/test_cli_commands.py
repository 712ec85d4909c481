"""The commands around training: help, data, export, evaluate, inspect, and the exit codes of wrong input."""

import pytest
from cli_fakes import names, read
from ray.exceptions import RayTaskError
from synthetic_run import make_run, one_turn_groups

from trial_envs.errors import ClosedEnvError, MissingDataError
from trial_ray import cli
from trial_ray.errors import ConfigError, EngineError, is_user_error
from trial_ray.files import write_json, write_text
from trial_ray.rollout.recording import write_groups
from trial_ray.runs.checkpoints import MODEL_INSIDE_CHECKPOINT

ALFWORLD = "--env trial/ALFWorld-v0 --split"


def run(line):
    """Return the exit code of the command line, also if argparse exits."""
    try:
        return cli.main(line.split())
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_examples(capsys, command):
    assert run(f"{command} --help") == 0
    text = capsys.readouterr().out
    assert f"trial-ray {command}" in text
    assert command == "doctor" or "examples:" in text


def test_completion_knows_options_and_methods(capsys):
    assert run("--print-completion bash") == 0
    script = capsys.readouterr().out
    assert "--checkpoint-every" in script
    assert "serl" in script


def test_generated_games_are_written_once_and_won_by_the_oracle(capsys, tmp_path):
    out = tmp_path / "games"
    result = tmp_path / "oracle.json"
    generate = f"data alfworld --generate 3 --seed 5 --difficulty tiny --out {out}"
    assert run(generate) == 0
    assert len(list(out.rglob("game.tw-pddl"))) == 3
    assert run(generate) == 2
    assert run(f"evaluate oracle {ALFWORLD} train --json {result} --set env_config.data={out}") == 0
    assert read(result)["summary"]["successes"] == 3


# The rescaling of rlsd would end after the last iteration.
WRONG = f"""
data alfworld --generate 3
data alfworld --generate 3 --difficulty hard --out g
evaluate oracle --env trial/ALFWorl-v0 --split train
evaluate oracle {ALFWORLD} test
evaluate oracle {ALFWORLD} valid_seen
evaluate oracle {ALFWORLD} generated --tasks 999
evaluate oracle {ALFWORLD} generated --tasks few
evaluate oracle {ALFWORLD} generated --tasks 0
evaluate oracle {ALFWORLD} generated --set model_path=m
evaluate nowhere {ALFWORLD} generated
evaluate {ALFWORLD} generated --endpoint http://user:secret@host/v1 --model m
evaluate {ALFWORLD} generated --endpoint https://h/v1?key=secret --model m
evaluate {ALFWORLD} generated --endpoint http://h/v1
evaluate {ALFWORLD} generated --endpoint http://h/v1 --model m --api-key-env NOT_SET
export nowhere out
export sftp://host/run out
inspect s3://AKIAKEY:sec/ret@bucket/run
report file:///nowhere/at/all
sweep nowhere.py
sweep experiment.py --out s3://bucket/sweep
train experiment.py --set hindsight_coef=0.1
train experiment.py --seed 4294967296
train experiment.py --method trail
train experiment.py --method nowhere.py
train experiment.py --method broken.py
train experiment.py --method rlsd
train experiment.py --out s3://bucket/run?session_token=secret
train experiment.py --resume nowhere
train experiment.py --resume file:///nowhere/run
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_bad_input_exits_2_and_writes_nothing(line, train, capsys, monkeypatch, tmp_path, tmp_path_factory):
    monkeypatch.setenv("ALFWORLD_DATA", f"{tmp_path}/nowhere")
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("x = 1")
    assert run(line) == 2
    error = capsys.readouterr().err
    assert not [part for part in ("Traceback", "AKIAKEY", "secret", "sec/ret") if part in error]
    assert names(tmp_path) == ["broken.py", "experiment.py"]


@pytest.mark.parametrize(
    "line",
    [
        "data alfworld --generate 1 --difficulty tiny --out {}",
        f"evaluate oracle {ALFWORLD} generated --tasks 1 --json {{}}",
        "export run {}",
        "report run --out {}",
        "report run --out page.html --figures {}",
    ],
)
@pytest.mark.parametrize("place", ["file/out", "/dev/null"])
def test_unwritable_place_is_named(line, place, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    checkpoint(tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text('{"iteration": 1, "env_runners/success_rate": 0.5}')
    assert run(line.format(place)) == 2
    error = capsys.readouterr().err
    assert place.removesuffix("/out") in error
    assert "Errno" not in error


def checkpoint(folder, iteration=3, complete=True):
    """Write a checkpoint as RLlib and the module do, with a model of a few bytes."""
    path = folder / f"checkpoints/{iteration:06d}"
    model = path / MODEL_INSIDE_CHECKPOINT
    write_text(model / "config.json", "{}")
    if complete:
        write_text(model / "model.safetensors", f"weights {iteration}")
    write_text(path / "rllib_checkpoint.json", "{}")


def test_export_copies_the_newest_model_and_never_overwrites(tmp_path):
    source = tmp_path / "run"
    target = tmp_path / "model"
    checkpoint(source, complete=False)
    export = f"export {source} {target}"
    assert run(export) == 2
    checkpoint(source, 12)
    for code in (0, 2):
        assert run(export) == code
        assert (target / "model.safetensors").read_text() == "weights 12"
    assert names(tmp_path) == ["model", "run"]


def test_errors_of_actors_keep_their_kind():
    for error, of_user in {
        MissingDataError: True,
        ConfigError: True,
        EngineError: False,
        ClosedEnvError: False,
    }.items():
        from_actor = RayTaskError("sample_groups", "traceback", error("died")).as_instanceof_cause()
        assert is_user_error(from_actor) == of_user
    assert not is_user_error(ValueError("a bug"))


# -- inspect -----------------------------------------------------------------------------------------------------------


def recorded_run(folder):
    """Write a run folder with one recorded trajectory of one turn in each of two iterations."""
    write_json(folder / "run.json", {"schema": "trial_ray/run", "schema_version": 1})
    groups = one_turn_groups(["[red]markup[/red] \x1b]0;title\x07 \x1b[2Jgone"])
    for iteration in (1, 2):
        write_groups(folder / "trajectories", iteration, groups, "runner001")
    return folder


def test_inspect_lists_trajectories_and_shows_turns(capsys, tmp_path):
    folder = recorded_run(tmp_path)
    assert run(f"inspect {folder} --text") == 0
    assert "iteration 2: 1 trajectories, 1 successful" in capsys.readouterr().out
    assert run(f"inspect {folder} --text --iteration 1 --show 1") == 0
    out, err = capsys.readouterr()
    for part in ("action (invalid form)\n  [red]markup[/red]", "reward 1\n  [red]markup[/red] ␛]0;title␇ ␛[2Jgone"):
        assert part in out
    assert not {"\x1b", "\x07"} & {*out}
    assert "Prompts and responses are not shown" in " ".join(err.split())


def test_inspect_shows_the_teacher_context_in_prompts(capsys, tmp_path, tokenizer):
    make_run(tmp_path, tokenizer, 8, iterations=1)
    assert run(f"inspect {tmp_path} --text --show 8") == 0
    text = capsys.readouterr().out
    for part in ("  look⟦\n  \n  Outcome after the reply:\n", "⟧<|assistant|>", "multiplier ", "</action><|end|>"):
        assert part in text


@pytest.mark.parametrize(
    "options", ["--iteration 3", "--text --show 2", "--show 1", "--text --open", "--text --out x", ". --text"]
)
def test_inspect_refuses_options_that_do_not_fit(tmp_path, options):
    assert run(f"inspect {recorded_run(tmp_path)} {options}") == 2


def test_inspect_needs_a_run_with_trajectories(tmp_path):
    assert run(f"inspect {tmp_path}/nowhere") == run(f"inspect {tmp_path}") == 2
    write_json(tmp_path / "run.json", {"schema": "trial_ray/run", "schema_version": 1})
    assert run(f"inspect {tmp_path}") == 2


def test_inspect_writes_a_page(capsys, tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    folder = recorded_run(tmp_path)
    assert run(f"inspect {folder} --open") == 0
    out, err = capsys.readouterr()
    assert out.strip() == f"2 trajectories: {tmp_path}/viewer/index.html"
    assert "no display" in err
    assert run(f"inspect {folder} {folder} --out {tmp_path}/both") == 0
    assert (tmp_path / "both/index.html").is_file()
