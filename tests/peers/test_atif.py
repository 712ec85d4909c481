"""Exported trajectories are valid documents of ATIF, by models of the format that share no code with the export.

The package ``atif`` implements the format's specification (RFC 0001 of Harbor) independently of it. Where ``harbor`` itself is
installed, which needs Python 3.12, its validator reads the same files.
"""

from __future__ import annotations

import pytest
from synthetic_run import make_run, save_tokenizer

from trial_ray.cli import main
from trial_ray.environments.alfworld import ADAPTER
from trial_ray.models.tiny import build_tokenizer

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", params=[True, False], ids=["with a tokenizer", "without"])
def files(request, tmp_path_factory):
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    folder = tmp_path_factory.mktemp("exported")
    run = make_run(folder / "run", tokenizer, 16)
    if request.param:
        save_tokenizer(run, tokenizer)
    assert main(["inspect", str(run), "--export", "atif", "--out", str(folder / "atif")]) == 0
    return sorted((folder / "atif").glob("iteration=*/*.json"))


def test_the_models_of_the_format_accept_every_document(files):
    atif = pytest.importorskip("atif")
    assert len(files) == 16
    for file in files:
        trajectory = atif.Trajectory.model_validate_json(file.read_bytes())
        assert [step.source for step in trajectory.steps] == ["user", *["agent"] * (len(trajectory.steps) - 1)]
        assert trajectory.final_metrics.total_completion_tokens == sum(
            len(step.metrics.completion_token_ids) for step in trajectory.steps[1:]
        )


def test_harbors_validator_accepts_every_document(files):
    validators = pytest.importorskip("harbor.utils.trajectory_validator")
    for file in files:
        validator = validators.TrajectoryValidator()
        assert validator.validate(file), validator.errors
