"""Experiment files, by path or by the name of a tuned example."""

import re
from pathlib import Path

import pytest

from trial_ray.errors import ConfigError, UserInputError
from trial_ray.rollout.recording import partition, partitions
from trial_ray.runs.experiment import experiment_file, load_experiment
from trial_ray.sweeps.study import scale_file
from trial_ray.warmstart import WarmStartSettings

EXAMPLES = Path(__file__).parents[2] / "tuned_examples"


@pytest.mark.parametrize("name", ["alfworld_qwen3_1.7b", "sweeps/lambda_alpha"])
def test_a_name_means_the_tuned_example_unless_the_user_has_such_a_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiment_file(name) == EXAMPLES / f"{name}.py"
    (tmp_path / "sweeps").mkdir()
    (tmp_path / name).touch()
    assert experiment_file(name).resolve() == tmp_path / name


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "alfworld_quikstart": "alfworld_quickstart",
        "tuned_examples/alfworld_qwen3_1.7.py": "alfworld_qwen3_1.7b",
        "mine.py": "my_mine.py",
        "folder/lambda_alpa.py": "folder/lambda_alpha.py",
    }.items(),
)
def test_the_error_names_the_nearest_file(name, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for own in ("my_mine.py", "folder/lambda_alpha.py"):
        (tmp_path / own).touch()
    with pytest.raises(UserInputError, match=rf"{re.escape(meant)}\?$"):
        load_experiment(experiment_file(name))


def test_an_error_names_the_line_of_the_file_that_is_run(tmp_path):
    (tmp_path / "broken_helper.py").write_text("\n\n\nx = = 1\n")
    (tmp_path / "mine.py").write_text("import broken_helper\n")
    with pytest.raises(UserInputError, match=r"mine\.py, line 1: SyntaxError: .*broken_helper\.py, line 4"):
        load_experiment(tmp_path / "mine.py")


@pytest.mark.parametrize("value", ["float('inf')", "True"])
def test_a_stop_criterion_must_be_a_finite_number(tmp_path, value):
    file = tmp_path / "mine.py"
    file.write_text(
        f"from trial_ray.algorithms import TRIALConfig\nconfig = TRIALConfig()\nstop = {{'training_iteration': {value}}}\n"
    )
    with pytest.raises(ConfigError):
        load_experiment(file)


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("from trial_ray.algorithms import TRIALConfig\nconfig = TRIALConfig()\n")
    assert load_experiment("~/mine.py").path == tmp_path / "mine.py"
    assert scale_file("~/mine.py") == tmp_path / "mine.py"
    assert WarmStartSettings(model_path="~/model").model_path == f"{tmp_path}/model"
    assert partition("~/rows", 1) == tmp_path / "rows/iteration=00001"
    partition("~/rows", 1).mkdir(parents=True)
    assert list(partitions("~/rows")) == [1]
