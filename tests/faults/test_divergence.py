"""A real run whose learning rate is absurd stops with a sentence on what to change, and saves no broken policy."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tiny_run import ChanceEnv, config_of, train
from user_env import registered

from trial_ray.cli import console as terminal
from trial_ray.errors import TrainingDivergedError, TrialRayError
from trial_ray.runs.checkpoints import find_model, list_checkpoints
from trial_ray.runs.folder import RunFolder

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(ChanceEnv):
        yield


def test_a_policy_that_one_update_has_destroyed_is_stopped_two_iterations_later(model_path, tmp_path, capsys, tell):
    """The weights stay numbers; the first update leaves one token for each prompt."""
    with pytest.raises(TrainingDivergedError) as stopped:
        train(tmp_path / "run", model_path, 20, config=config_of(model_path, lr=10.0))
    assert terminal.report(stopped.value, verbose=False) == terminal.FAILED
    assert "lower lr" in capsys.readouterr().err
    iterations = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(iterations) == 3
    tell("lr=10", "update", "typed error two iterations later")


@pytest.mark.parametrize("lr", [1e30, 1e300])
def test_an_absurd_learning_rate(lr, model_path, tmp_path, capsys, tell):
    """From weights that are no numbers any more to weights that are, and give a policy that is lost."""
    from safetensors.torch import load_file

    printed = io.StringIO()
    config = config_of(model_path, lr=lr).guards(guard_patience=2, min_entropy=0.5)
    with pytest.raises(TrialRayError) as stopped:
        train(tmp_path / "run", model_path, 20, config=config, console=Console(file=printed, width=300))
    assert terminal.report(stopped.value, verbose=False) == terminal.FAILED
    told = capsys.readouterr().err.lower()
    print(told, printed.getvalue())
    assert "lower lr" in told
    assert RunFolder.reopen(tmp_path / "run").state() == "failed"
    for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints"):
        for file in find_model(checkpoint).glob("*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(file).values())
    tell(f"lr={lr:g}", "update", "typed error; no broken policy saved")
