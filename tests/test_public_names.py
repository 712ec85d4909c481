"""The public names of the package are those that its list of names promises, and come without RLlib until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trial_ray
from trial_ray import algorithms, environments
from trial_ray.algorithms.methods import METHODS, config_class


def test_every_public_name_is_there_and_no_other_answers():
    assert {name for name in trial_ray.__all__ if getattr(trial_ray, name) is None} == set()
    with pytest.raises(AttributeError, match="'trial_ray' has no attribute 'PPOConfig'"):
        _ = trial_ray.PPOConfig


def test_the_config_of_every_method_is_a_public_name():
    assert {config_class(method).__name__ for method in METHODS} <= set(trial_ray.__all__)


def test_earlier_paths_give_the_same_classes():
    assert {name: getattr(algorithms, name) for name in algorithms.__all__} == {
        name: getattr(trial_ray, name) for name in algorithms.__all__
    }
    assert environments.EnvironmentAdapter is trial_ray.EnvironmentAdapter


def test_the_package_alone_imports_neither_ray_nor_torch():
    code = "import sys, trial_ray; print({'ray', 'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
