"""A checkpoint behind ``vllm serve`` solves the tasks that ``trial-ray evaluate`` solves with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import served

from trial_ray.cli import main
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.models.packaged import alfworld_tiny

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
    theirs, own = tmp_path / "served.json", tmp_path / "own.json"
    assert main(["evaluate", "--endpoint", endpoint, "--model", "tiny", *TASKS, *settings, "--json", str(theirs)]) == 0
    # In a process of its own, whose Ray is not that of other tests.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = Path(sys.executable).with_name("trial-ray")
    command = [program, "evaluate", alfworld_tiny(), *TASKS, *settings, "--json", own]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=EVALUATION_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found, expected = EvaluationResult.load(theirs), EvaluationResult.load(own)
    assert not protocol_difference(found.protocol, expected.protocol)
    assert 0 < expected.success_rate < 1, "or it is not tested"
    assert found.episodes == expected.episodes
