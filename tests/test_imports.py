"""Public names exist, and imports follow the contracts in ``pyproject.toml``."""

import graphlib
from pathlib import Path

import grimp
import pytest
from commands import run_python
from importlinter.api import read_configuration

import trial_ray
from trial_ray import adapters, algorithms
from trial_ray.algorithms.methods import METHODS, config_class


def test_no_file_imports_itself_through_others():
    configuration = read_configuration(f"{Path(__file__).parents[1]}/pyproject.toml")
    graph = grimp.build_graph(*configuration["session_options"]["root_packages"], cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises an error that names the cycle


STARTERS = {
    "from trial_ray import cli; cli.build_parser()": {"ray", "torch", "transformers", "gymnasium", "rich", "pyarrow"},
    # An experiment file imports this before its errors can be reported.
    "from trial_ray import TRIALConfig": {"transformers", "torch.distributed.fsdp", "torch.distributed.checkpoint"},
    # Every process of an environment imports this.
    "import trial_ray.adapters.processes": {"torch", "transformers", "ray.rllib", "pyarrow", "pandas"},
    "import trial_ray.engines.transformers": {"ray.rllib", "pandas"},
}


WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys("rapidfuzz textworld alfworld vllm peft openai matplotlib optuna wandb".split())
from trial_ray import TRIALConfig, cli
cli.build_parser()
import trial_ray.adapters.registry
"""


def test_runs_are_set_up_without_the_packages_of_the_extras():
    assert run_python(WITHOUT_EXTRAS).returncode == 0


@pytest.mark.parametrize(("work", "heavy"), STARTERS.items())
def test_nothing_heavy_is_imported_before_it_is_needed(work, heavy):
    done = run_python(f"import sys; {work}; print({heavy} & set(sys.modules))")
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_exactly_the_public_names_exist():
    assert all(getattr(trial_ray, name) is not None for name in trial_ray.__all__)
    assert {config_class(method).__name__ for method in METHODS} <= set(trial_ray.__all__)
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is getattr(trial_ray, name)
    assert adapters.EnvironmentAdapter is trial_ray.EnvironmentAdapter
    with pytest.raises(AttributeError):
        _ = trial_ray.PPOConfig
