"""A checkpoint behind ``vllm serve`` solves the same tasks as in ``trial-ray evaluate``."""

import sys

import pytest
from commands import finished
from vllm_server import served

from trial_ray.cli import main
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.models.folders import alfworld_tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
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


def test_greedy_episodes_are_those_of_the_checkpoint(tmp_path):
    pytest.importorskip("vllm")
    settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    files = tmp_path / "served.json", tmp_path / "own.json"
    words = [[*TASKS, *settings, "--json", str(file)] for file in files]
    lengths = ("--max-model-len", "544", "--max-num-seqs", "8")
    with served(sys.executable, alfworld_tiny(), tmp_path / "vllm.log", *lengths) as url:
        assert main(["evaluate", "--endpoint", url, "--model", "tiny", *words[0]]) == 0
    # A process of its own, because other tests of this process use another Ray.
    code, printed = finished("evaluate", alfworld_tiny(), *words[1])
    assert code == 0, printed
    result, expected = map(EvaluationResult.load, files)
    assert not protocol_difference(result.protocol, expected.protocol)
    assert 0 < expected.success_rate < 1, "or it is not tested"
    assert result.episodes == expected.episodes
