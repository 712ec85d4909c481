"""Imports point one way, as the contracts in ``pyproject.toml`` say; what type checkers alone import counts, too."""

from __future__ import annotations

import copy
import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.application.use_cases import lint_imports

ROOT = Path(__file__).parents[1]
CONFIGURATION = read_configuration(str(ROOT / "pyproject.toml"))
CONTRACTS = {options["type"]: options for options in CONFIGURATION["contracts_options"]}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(*CONFIGURATION["session_options"]["root_packages"], cache_dir=None)


def test_the_contracts_are_kept():
    # Not the command's own function, which switches off the loggers of all other modules.
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None, no_logo=True)


def test_no_file_imports_itself_through_others(graph):
    graph = copy.deepcopy(graph)
    for exception in CONTRACTS["acyclic_siblings"]["ignore_imports"]:
        importer, imported = exception.split(" -> ")
        graph.remove_import(importer=importer, imported=imported)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises an error that names the cycle


def test_only_the_config_names_the_algorithm_that_is_made_of_it():
    assert CONTRACTS["acyclic_siblings"]["ignore_imports"] == [
        "trial_ray.algorithms.config -> trial_ray.algorithms.grpo"
    ]
    assert all("ignore_imports" not in options for name, options in CONTRACTS.items() if name != "acyclic_siblings")


def test_what_type_checkers_import_is_looked_at(graph):
    assert "exclude_type_checking_imports" not in CONFIGURATION["session_options"]
    importer, imported = "trial_ray.cli.train", "trial_ray.algorithms.config"
    assert graph.direct_import_exists(importer=importer, imported=imported)


def test_contributors_are_told_the_same_direction():
    layers = " → ".join(CONTRACTS["layers"]["layers"])
    assert f"`{layers}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_command_line_imports_neither_ray_nor_torch_before_a_command_needs_them():
    code = (
        "import sys; from trial_ray import cli; cli.build_parser();"
        "print({'ray', 'torch', 'numpy', 'transformers', 'gymnasium', 'rich', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
