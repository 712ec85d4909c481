"""A checkpoint behind ``vllm serve`` solves the same tasks as in ``trial-ray evaluate``."""

import sys

import pytest
from commands import finished
from vllm_server import served

from trial_ray.cli import main
from trial_ray.evaluation.results import EvaluationResult, protocol_difference
from trial_ray.models.folders import alfworld_tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
OPTIONS = """
--env trial/ALFWorld-v0 --split generated --tasks 24 --set env_config.num_games=24 --set prompt_style=plain
--set history_window=1 --set max_prompt_tokens=512 --set max_response_tokens=16 --set evaluation_temperature=0
--set engine=transformers --json
"""


def test_greedy_episodes_are_those_of_the_checkpoint(tmp_path):
    pytest.importorskip("vllm")
    files = tmp_path / "served.json", tmp_path / "own.json"
    lengths = "--max-model-len 544 --max-num-seqs 8"
    with served(sys.executable, alfworld_tiny(), tmp_path / "vllm.log", *lengths.split()) as url:
        assert main([*f"evaluate --endpoint {url} --model tiny {OPTIONS}".split(), str(files[0])]) == 0
    # A process of its own, because other tests of this process use another Ray.
    code, printed = finished("evaluate", alfworld_tiny(), *OPTIONS.split(), files[1])
    assert code == 0, printed
    result, expected = map(EvaluationResult.load, files)
    assert not protocol_difference(result.protocol, expected.protocol)
    assert 0 < expected.success_rate < 1, "or it is not tested"
    assert result.episodes == expected.episodes
