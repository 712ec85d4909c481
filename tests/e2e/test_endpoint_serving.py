"""A checkpoint behind ``vllm serve`` solves the same tasks as in ``trial-ray evaluate``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import served

from trial_ray.cli import main
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.models.folders import alfworld_tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
EVALUATION_S = 600
TASKS = ["--env", "trial/ALFWorld-v0", "--split", "generated", "--tasks", "24"]
SETTINGS = {
    "env_config.num_games": 24,
    "prompt_style": "plain",
    "history_window": 1,
    "max_prompt_tokens": 512,
    "max_response_tokens": 16,
    "evaluation_temperature": 0,
    "engine": "transformers",
}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    pytest.importorskip("vllm")
    log = tmp_path_factory.mktemp("served") / "vllm.log"
    with served(sys.executable, alfworld_tiny(), log, "--max-model-len", "544", "--max-num-seqs", "8") as url:
        yield url


def test_greedy_episodes_are_those_of_the_checkpoint(endpoint, tmp_path):
    settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    served_file, own_file = tmp_path / "served.json", tmp_path / "own.json"
    assert (
        main(["evaluate", "--endpoint", endpoint, "--model", "tiny", *TASKS, *settings, "--json", str(served_file)])
        == 0
    )
    # A process of its own, because other tests of this process use another Ray.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = Path(sys.executable).with_name("trial-ray")
    command = [program, "evaluate", alfworld_tiny(), *TASKS, *settings, "--json", own_file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=EVALUATION_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result, expected = EvaluationResult.load(served_file), EvaluationResult.load(own_file)
    assert not protocol_difference(result.protocol, expected.protocol)
    assert 0 < expected.success_rate < 1, "or it is not tested"
    assert result.episodes == expected.episodes
