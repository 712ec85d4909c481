"""Plans behind the paper's tables and figures, what is done of them, and what finished runs become."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from cli_fakes import FakeAlgorithm, iterations
from evaluation_samples import coin_flips, evaluation
from rich.console import Console

from trial_ray import cli, termination
from trial_ray.errors import ConfigError, UserInputError
from trial_ray.evaluation.panels import Panel
from trial_ray.reproduction import STUDIES, choose, load_scale, plan_choice, plan_runs, scale_names
from trial_ray.reproduction.artefacts import assemble, paired_markdown, telling_task
from trial_ray.reproduction.execution import write_plan
from trial_ray.runs import session as training_session
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.session import TrainingSession
from trial_ray.termination import StopRequest

SCALE = """
from trial_ray.algorithms import TRIALConfig
from trial_ray.reproduction import EvaluationSet, Scale


def configure(environment, backbone):
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny"})
        .rl_module(model_path=f"models/{backbone}")
        .training(hindsight_start_iteration=2, lr=LR)
    )


scale = Scale(
    configure=configure,
    environments={"alfworld": (EvaluationSet("generated", 20),), "more": (EvaluationSet("generated"),)},
    backbones=("A", "B"),
    controlled_backbone="B",
    iterations=10,
    seeds=2,
    method_settings={"serl": {"rescaling_iterations": 5}, "rlsd": {"rescaling_iterations": 10}},
)
"""


@pytest.fixture
def scale_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCALE.replace("LR", "1e-5"))
    return path


def plan(name, scale_file, folder, **options):
    return plan_runs(STUDIES[name], load_scale(str(scale_file)), folder, **options)


def finish(run, scale_file, rate, state="done"):
    """What a run leaves when it has been trained and evaluated."""
    folder = RunFolder.create(run.folder, run.config, scale_file, ["test"])
    for place in run.sets:
        evaluation(coin_flips(20, rate, run.seed), split=place.split).save(run.evaluation(place))
    lines = []
    for iteration in range(1, run.iterations + 1):
        success = rate * iteration / run.iterations
        line = {
            "iteration": iteration,
            "evaluation/env_runners/success_rate": success,
            "env_runners/success_rate": success,
            "rows/sampled": 5,
            "learners/default_policy/num_module_steps_trained": 4,
        }
        if run.method == "trial":
            line |= {
                "learners/default_policy/trial/turn_score_mean": 0.2 - 0.01 * iteration + 0.1 * run.seed,
                "learners/default_policy/trial/turn_weight_std": 0.3,
            }
        lines.append(json.dumps(line))
    folder.metrics.write_text("\n".join(lines) + "\n")
    folder.set_state(state)


def test_a_study_expands_to_environments_backbones_methods_and_seeds(scale_file, tmp_path):
    runs = plan("table2", scale_file, tmp_path / "out", seeds=3)
    assert len(runs) == 2 * 2 * 6 * 3
    assert len({run.folder for run in runs}) == len(runs)
    controlled = plan("table3", scale_file, tmp_path / "out")
    assert {run.backbone for run in controlled} == {"B"}
    assert [run.method for run in controlled[:8:2]] == ["grpo", "uniform", "permuted", "trial"]
    assert {run.config.seed for run in controlled} == {0, 1}
    assert {run.environment for run in plan("figure2", scale_file, tmp_path / "out")} == {"alfworld"}
    shared = {run.folder for run in runs} & {run.folder for run in controlled}
    assert len(shared) == 2 * 2 * 2  # GRPO and TRIAL of backbone B, both environments, two seeds


def test_every_run_carries_the_scales_settings_and_the_overrides(scale_file, tmp_path):
    runs = plan("table2", scale_file, tmp_path, overrides=["group_size=4", "hindsight_coeff=0.3"])
    by_method = {run.method: run.config for run in runs}
    assert {config.group_size for config in by_method.values()} == {4}
    assert {config.lr for config in by_method.values()} == {1e-5}
    assert by_method["trial"].hindsight_coeff == 0.3
    assert by_method["serl"].rescaling_iterations == 5
    assert by_method["sdar"].privileged_view == "skill"
    with pytest.raises(ConfigError, match="group_siez"):
        plan("table2", scale_file, tmp_path, overrides=["group_siez=4"])


def test_a_schedule_longer_than_the_runs_is_refused(scale_file, tmp_path):
    with pytest.raises(ConfigError, match="rescaling_iterations is 10"):
        plan("table2", scale_file, tmp_path, iterations=9)
    assert plan("table3", scale_file, tmp_path, iterations=9)


def test_what_is_done_is_told_from_what_is_not(scale_file, tmp_path):
    first, second, *_ = plan("table3", scale_file, tmp_path)
    assert first.state() == "new"
    finish(first, scale_file, 0.5)
    assert first.state() == "done"
    finish(second, scale_file, 0.5, state="running")
    assert second.state() == "unfinished"
    first.evaluation(first.sets[0]).unlink()
    assert first.state() == "unfinished"


def test_a_run_of_another_config_is_never_taken_for_ours(scale_file, tmp_path):
    run = plan("table3", scale_file, tmp_path)[0]
    finish(run, scale_file, 0.5)
    with pytest.raises(UserInputError, match=r"another config: lr is 1e-05 there and 0\.5 here"):
        plan("table3", scale_file, tmp_path, overrides=["lr=0.5"])[0].state()
    (RunFolder(run.folder).checkpoints / "000011").mkdir()
    (RunFolder(run.folder).checkpoints / "000011" / "rllib_checkpoint.json").write_text("{}")
    with pytest.raises(UserInputError, match="trained for 11 iterations; this study wants 10"):
        run.state()


def test_a_run_that_was_resumed_with_another_config_is_never_taken_for_ours(scale_file, tmp_path):
    run = plan("table3", scale_file, tmp_path)[0]
    finish(run, scale_file, 0.5)
    other = run.config.copy(copy_frozen=False).training(lr=0.5)
    RunFolder.reopen(run.folder).resume(other, 5)
    RunFolder.reopen(run.folder).resume(run.config, 8)
    with pytest.raises(UserInputError, match=r"lr is 0\.5 there from iteration 6 on and 1e-05 here"):
        run.state()
    RunFolder.reopen(run.folder).resume(run.config, 5)  # the other config's iterations are made again
    assert run.state() == "unfinished"


def test_moved_folders_stay_done(scale_file, tmp_path):
    run = plan("table3", scale_file, tmp_path / "here")[0]
    finish(run, scale_file, 0.5)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert plan("table3", scale_file, tmp_path / "there")[0].state() == "done"


def test_a_table_is_made_of_the_runs_that_are_done(scale_file, tmp_path):
    runs = [run for run in plan("table3", scale_file, tmp_path) if run.environment == "alfworld"]
    with pytest.raises(UserInputError, match="None of the 8 runs"):
        assemble("table3", runs, tmp_path)
    for run in runs[:-1]:
        finish(run, scale_file, {"grpo": 0.2, "trial": 0.8}.get(run.method, 0.5))
    paths = assemble("table3", runs, tmp_path)
    assert [path.name for path in paths] == ["table3.json", "table3.md", "table3.tex"]
    value = json.loads(paths[0].read_text())
    assert [row["method"] for row in value["rows"]] == ["grpo", "uniform", "permuted", "trial"]
    assert [row["cells"][-1]["seeds"] for row in value["rows"]] == [2, 2, 2, 1]
    expected = np.mean([coin_flips(20, 0.2, seed) for seed in (0, 1)])
    assert value["rows"][0]["cells"][-1]["mean"] == pytest.approx(expected)
    assert {found["reference"] for found in value["comparisons"]} == {"grpo", "uniform", "permuted"}


CHOICE = """
from dataclasses import replace
from trial_ray.reproduction import Choice

scale = replace(
    scale,
    environments={"alfworld": (EvaluationSet("generated", 20),)},
    method_seeds={"gigpo": 1},
    choice=Choice(
        setting="hindsight_coeff",
        values=(0.01, 0.1),
        methods=("uniform", "trial"),
        seeds=(100, 101),
        training_games={"generator_seed": 5},
        panel_games={"generator_seed": 6},
    ),
)
"""


@pytest.fixture
def choosing_file(scale_file):
    scale_file.write_text(scale_file.read_text() + CHOICE)
    return scale_file


def test_a_setting_is_chosen_on_games_of_its_own_and_then_used(choosing_file, tmp_path):
    study, scale = STUDIES["study"], load_scale(str(choosing_file))
    trials = plan_choice(study, scale, tmp_path)
    assert len(trials) == 2 * 2 * 2  # methods, values, seeds
    assert {(run.method, run.config.hindsight_coeff) for run in trials} == {
        (method, value) for method in ("uniform", "trial") for value in (0.01, 0.1)
    }
    with pytest.raises(UserInputError, match="8 of 8 runs are not done"):
        choose(trials)
    best = {("uniform", 0.01): 0.8, ("uniform", 0.1): 0.3, ("trial", 0.01): 0.3, ("trial", 0.1): 0.9}
    for run in trials:
        finish(run, choosing_file, best[run.method, run.value])
    chosen, tried = choose(trials)
    assert chosen == {("alfworld", "B", "uniform"): 0.01, ("alfworld", "B", "trial"): 0.1}
    assert len(tried) == 4
    assert sum(each["chosen"] for each in tried) == 2
    runs = plan_runs(study, scale, tmp_path, chosen=chosen)
    used = {run.method: run.config.hindsight_coeff for run in runs if run.method in ("uniform", "trial")}
    assert used == {"uniform": 0.01, "trial": 0.1}
    assert {run.config.value_weighting for run in runs if run.method == "value_weighted"} == {True}
    assert [run.seed for run in runs if run.method == "gigpo"] == [0]
    # No game and no seed that something was chosen on takes part in the study.
    places = [(run.config.env_config, run.config.evaluation_env_config) for run in (*trials, *runs)]
    games = [tuple(config.get("generator_seed", 0) for config in pair) for pair in places]
    assert set(games[: len(trials)]) == {(5, 6)}
    assert not {5, 6} & {seed for pair in games[len(trials) :] for seed in pair}
    assert not {run.seed for run in trials} & {run.seed for run in runs}
    assert not {run.folder for run in trials} & {run.folder for run in runs}


def test_equal_sums_of_successes_are_equal_values(tmp_path):
    runs = []
    for value, seed, won in ((0.01, 0, 20), (0.01, 1, 24), (0.1, 0, 27), (0.1, 1, 17)):
        path = evaluation([index < won for index in range(100)]).save(tmp_path / f"{value}-{seed}.json")
        about = {"environment": "e", "backbone": "b", "method": "trial", "value": value, "sets": ("s",), "name": "r"}
        runs.append(SimpleNamespace(**about, state=lambda: "done", evaluation=lambda _, path=path: path))
    assert list(choose(runs)[0].values()) == [0.01]


def test_the_study_tells_success_area_and_differences(choosing_file, tmp_path):
    study, scale = STUDIES["study"], load_scale(str(choosing_file))
    runs = [run for run in plan_runs(study, scale, tmp_path) if run.method in ("grpo", "permuted", "trial")]
    for run in runs:
        finish(run, choosing_file, {"grpo": 0.4, "permuted": 0.4, "trial": 0.8}[run.method])
    paths = {path.name: path for path in assemble("study", runs, tmp_path, [{"value": 0.1}])}
    table = json.loads(paths["study.json"].read_text())
    assert {(found["method"], found["reference"]) for found in table["comparisons"]} == {
        ("permuted", "grpo"), ("trial", "grpo"), ("trial", "permuted"),
    }  # fmt: skip
    assert all(found["p_holm"] >= found["p_value"] for found in table["comparisons"])
    learned = json.loads(paths["study_learning_alfworld.json"].read_text())
    rates = [iteration / 10 for iteration in range(1, 11)]
    assert learned["methods"]["trial"]["area"] == pytest.approx(0.8 * np.mean(rates))
    assert learned["success_to_reach"] == pytest.approx(0.4 * np.mean(rates[-5:]))
    assert learned["methods"]["trial"]["median_iterations"] == 6  # 0.8 times the mean of 0.2 to 0.6 is 0.32
    assert learned["methods"]["grpo"]["median_iterations"] == 10
    assert learned["tried"] == [{"value": 0.1}]
    assert paths["study_learning_alfworld.png"].read_bytes().startswith(b"\x89PNG")
    assert "TRIAL − Permuted | +22.0" in paths["study_learning.md"].read_text()
    of_trial = [row for row in json.loads(paths["study_runs.json"].read_text())["runs"] if row["method"] == "trial"]
    assert [row["area"] for row in of_trial] == pytest.approx([0.44] * len(of_trial))
    assert {(row["rows_sampled"], row["rows_trained"]) for row in of_trial} == {(50, 40)}
    (row,) = (row for row in table["rows"] if row["method"] == "trial")
    assert {str(run["seed"]): run["success"] for run in of_trial} == pytest.approx(row["cells"][-1]["by_seed"])
    assert {"effects.json", "effects.png"} <= paths.keys()


def test_figure2_holds_curves_and_windows_of_five(scale_file, tmp_path):
    runs = plan("figure2", scale_file, tmp_path)
    for run in runs:
        finish(run, scale_file, 0.8 if run.method == "trial" else 0.4)
    paths = assemble("figure2", runs, tmp_path)
    data = json.loads(paths[0].read_text())
    assert [series["name"] for series in data["panel"]] == ["GRPO (2 seeds)", "TRIAL (2 seeds)"]
    assert (data["panel"][1]["x"][-1], data["panel"][1]["mean"][-1]) == (10, 0.8)
    (windows,) = data["turn_score"]
    assert windows["x"] == [3, 8]
    assert windows["mean"][0] == pytest.approx(0.2 - 0.03 + 0.05)
    assert [run["y"][0] for run in windows["runs"]] == pytest.approx([0.17, 0.27])
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_the_telling_game_is_one_that_only_the_other_solved():
    first, second = evaluation([1, 1, 0, 0, 0, 0]), evaluation([0, 1, 0, 1, 1, 0])
    assert telling_task(first, second, None) == "valid_seen/3"
    assert telling_task(first, second, second.episodes[4].family) == "valid_seen/4"
    assert telling_task(first, second, "absent") == "valid_seen/3"


def test_paired_traces_show_hostile_text_as_text():
    turn = {"action": "a|b <img>`", "outcome": "x.\ny", "score": 0.1, "weight": 1.0}
    traces = {"GRPO": {"turns": [turn], "success": False}, "TRIAL": {"turns": [turn, turn], "success": True}}
    text = paired_markdown({"task_id": "t", "seed": 0, "traces": traces})
    assert "a\\|b \\<img\\>\\`" in text
    assert "GRPO fails after 1 turns; TRIAL succeeds after 2 turns" in text
    assert "needs finished runs" in paired_markdown(None)


@pytest.mark.parametrize("name", scale_names())
@pytest.mark.parametrize("study", STUDIES)
def test_the_scales_that_come_along_are_valid(name, study, tmp_path):
    scale, needed = load_scale(name), set(STUDIES[study].environments or ())
    if needed <= set(scale.environments):
        assert len(plan_runs(STUDIES[study], scale, tmp_path, seeds=1)) >= 2
    else:
        with pytest.raises(UserInputError, match="has no environment 'alfworld'"):
            plan_runs(STUDIES[study], scale, tmp_path, seeds=1)


def test_the_paper_scale_is_the_papers_protocol(tmp_path):
    runs = plan_runs(STUDIES["table2"], load_scale("paper"), tmp_path, seeds=1)
    assert {run.iterations for run in runs} == {150}
    shared = {"tasks_per_iteration": 16, "group_size": 8, "lr": 1e-6, "max_response_tokens": 512, "gap_clip": 2.0}
    shared |= {"clamp_alpha": 1.0, "hindsight_start_iteration": 25}
    names = ("minibatch_rows", "microbatch_rows", "max_prompt_tokens", "hindsight_coeff")
    own = {"alfworld": (256, 32, 2048, 0.01, 50), "webshop": (64, 8, 4096, 0.005, 15)}
    for run in runs:
        if run.method == "trial":
            assert {name: getattr(run.config, name) for name in shared} == shared
            found = *(getattr(run.config, name) for name in names), run.config.env_config["max_turns"]
            assert found == own[run.environment]
    assert {place.split for run in runs for place in run.sets} == {"valid_seen", "valid_unseen", "test"}


def run_cli(*arguments):
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def test_dry_run_starts_and_writes_nothing(scale_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_cli("reproduce", "table3", "--scale", scale_file, "--out", out, "--seeds", 1, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "8 runs: 8 new" in text
    assert text.count("permuted") == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table9", "--scale", "tiny"], "table9"),
        (["table3", "--scale", "huge"], "no scale 'huge'"),
        (["table3", "--scale", "tiny", "--set", "lrr=1"], "lrr"),
        (["table3"], "--scale"),
    ],
)
def test_bad_input_exits_2(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_cli("reproduce", *arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_scale_file_must_define_a_scale(tmp_path):
    (tmp_path / "empty.py").write_text("scale = 3")
    with pytest.raises(UserInputError, match="must define `scale`"):
        load_scale(str(tmp_path / "empty.py"))


def test_finished_runs_are_assembled_without_ray(scale_file, tmp_path, capsys, monkeypatch):
    for run in plan("table3", scale_file, tmp_path / "out", seeds=1):
        if run.environment == "alfworld":
            finish(run, scale_file, 0.5)
    text = scale_file.read_text().replace(', "more": (EvaluationSet("generated"),)', "")
    scale_file.write_text(text)
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", None)
    assert run_cli("reproduce", "table3", "--scale", scale_file, "--out", tmp_path / "out", "--seeds", 1) == 0
    assert "4 done" in capsys.readouterr().out
    assert (tmp_path / "out" / "table3.tex").is_file()


@pytest.fixture
def session_of(tmp_path, scale_file, monkeypatch):
    """Train a planned run of three iterations, with a fake algorithm."""
    panel = Panel("trial/ALFWorld-v0", "generated", tuple(f"t{i}" for i in range(20)))
    run = plan("table3", scale_file, tmp_path, iterations=3)[0]
    folder = RunFolder.create(run.folder, run.config, scale_file, ["test"])
    monkeypatch.chdir(tmp_path)

    def train(on_train=None, **options):
        monkeypatch.setattr(type(run.config), "build_algo", lambda self: FakeAlgorithm(on_train=on_train))
        panels = {"generated-20": (panel, None)}
        TrainingSession(
            run.config, {"training_iteration": 3}, folder, Console(quiet=True), final_panels=panels, **options
        ).run(nullcontext())
        return run, folder

    return train


def test_a_session_plays_its_final_panels_and_names_them_by_iteration(session_of):
    told = []
    run, folder = session_of(on_iteration=lambda metrics: told.append(metrics["training_iteration"]))
    assert told == [1, 2, 3]
    assert [path.name for path in folder.evaluations.iterdir()] == ["generated-20_000003.json"]
    assert run.state() == "done"
    labels = json.loads(run.evaluation(run.sets[0]).read_text())["labels"]
    assert labels == {"method": "grpo", "backbone": "B", "seed": 0, "iteration": 3}


def test_a_run_that_is_out_of_time_is_saved_and_goes_on_later(session_of, tmp_path, monkeypatch):
    seconds = [0.0]

    def work(iteration):
        seconds[0] += 10.0

    clock = SimpleNamespace(time=lambda: seconds[0], monotonic=lambda: seconds[0])
    for module in (training_session, termination):
        monkeypatch.setattr(module, "time", clock)

    def train(deadline, resume):
        run, folder = session_of(work, stop_request=StopRequest(deadline), resume=resume)
        rows = json.loads(write_plan(tmp_path, "table3", [run]).read_text())
        return folder, (run.trained, run.state(), rows["iterations_left"])

    # The second iteration would end after the deadline if it took as long as the first one.
    folder, reached = train(15.0, resume=False)
    assert reached == (1, "unfinished", 2)
    assert not list(folder.evaluations.iterdir())
    assert train(None, resume=True)[1] == (3, "done", 0)
    assert iterations(folder.path) == [1, 2, 3]


def test_after_the_time_of_a_command_or_its_interrupt_no_run_is_begun(scale_file, tmp_path):
    from trial_ray.reproduction.execution import _train

    run = plan("table3", scale_file, tmp_path)[0]
    (interrupted := tmp_path / "interrupted").touch()
    for request in (StopRequest(deadline=1.0), StopRequest(file=interrupted)):
        _train({"run": run.name}, {run.name: run}, scale_file, trust=False, request=request)
        assert not run.folder.exists()


def test_a_run_is_saved_after_the_iteration_in_which_its_command_was_interrupted(session_of, tmp_path):
    file = tmp_path / "interrupted"

    def interrupt(iteration):
        if iteration == 2:
            file.touch()

    run, folder = session_of(interrupt, stop_request=StopRequest(file=file))
    assert (run.trained, run.state()) == (2, "unfinished")
    assert not list(folder.evaluations.iterdir())
    file.unlink()
    run, folder = session_of(stop_request=StopRequest(file=file), resume=True)
    assert (run.trained, run.state(), iterations(folder.path)) == (3, "done", [1, 2, 3])


def test_runs_that_begin_alike_share_one_warm_start(scale_file, tmp_path, monkeypatch):
    from trial_ray.algorithms import initial_policy
    from trial_ray.reproduction.execution import make_warm_starts

    made = []
    monkeypatch.setattr(initial_policy, "initial_policy", lambda config: made.append(config.warm_start))
    text = scale_file.read_text().replace('model_path=f"models/{backbone}"', 'warm_start={"size": "nano"}')
    scale_file.write_text(text)
    runs = [run for run in plan("table3", scale_file, tmp_path) if run.environment == "alfworld"]
    make_warm_starts(runs, deadline=1.0)
    assert made == []
    make_warm_starts(runs)
    assert made == [{"size": "nano"}]
