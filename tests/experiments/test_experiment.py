"""Experiments by path or by the name of a tuned example."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_ray.errors import UserInputError
from trial_ray.experiments.experiment import examples_folder, experiment_file, load_experiment

EXAMPLES = Path(__file__).parents[2] / "tuned_examples"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_clone_has_its_examples_at_the_top():
    assert examples_folder() == EXAMPLES


@pytest.mark.parametrize("name", ["alfworld_quickstart", "alfworld_qwen3_1.7b", "sweeps/lambda_alpha"])
def test_a_name_means_the_tuned_example(name):
    assert experiment_file(name) == EXAMPLES / f"{name}.py"


def test_a_file_of_the_users_comes_first(tmp_path):
    for name in ("alfworld_quickstart", "own.py"):
        (tmp_path / name).write_text("")
        assert experiment_file(name).resolve() == tmp_path / name


@pytest.mark.parametrize("name", ["alfworld_quikstart", "own.py", "alfworld_quickstart.py"])
def test_what_is_neither_is_told(name):
    with pytest.raises(UserInputError, match=f"{name} is neither a file nor a tuned example"):
        load_experiment(experiment_file(name))
