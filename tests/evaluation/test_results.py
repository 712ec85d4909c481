"""Evaluation results: rates, families, JSON and table; the sets of tasks; evaluations during training that fail."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import pytest
from evaluation_samples import evaluation
from rich.text import Text

from trial_ray import GRPO, GRPOConfig
from trial_ray.algorithms.startup import compare_initial_weights
from trial_ray.errors import CheckpointError, EngineError, EnvironmentFaultError, UnsupportedError
from trial_ray.evaluation.evaluation_sets import EvaluationSet, EvaluationSetError
from trial_ray.evaluation.player import scripted_protocol
from trial_ray.evaluation.results import EvaluationResult, protocol_card


def sample():
    """Two episodes of each of two families, of which one is longer than the others and one failed."""
    result = evaluation([1, 0, 1, 0], families=("look", "look", "heat", "heat"), failed=1)
    result.episodes[1] = replace(result.episodes[1], turns=49)
    return result


def test_failed_episodes_are_counted_apart():
    result = sample()
    assert result.success_rate == pytest.approx(2 / 3)
    assert result.num_failed == 1
    families = result.per_family()
    assert list(families) == ["heat", "look"]
    assert families["heat"].successes == families["heat"].episodes == 1
    assert families["look"].turns == 27
    table = result.table("held-out games")
    rows = [[*column.cells] for column in table.columns[:3]]
    assert rows == [[Text("heat"), Text("look"), Text("all")], ["1", "2", "3"], ["100.0%", "50.0%", "66.7%"]]
    assert table.caption.startswith("1 episode(s)")


def test_empty_result_is_strict_json(tmp_path):
    empty = EvaluationResult({"env": "x"})
    assert math.isnan(empty.success_rate)
    assert json.loads(empty.save(tmp_path / "e.json").read_text())["summary"]["success_rate"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 99},
        {"protocol": None},
        {"labels": ["seed"]},
        {"policy": {}},
        *({"episodes": [{**sample().to_dict()["episodes"][0], name: value}]} for name, value in {
            "success": 1, "score": float("nan"), "turns": "3", "task_id": [], "unknown": 1,
        }.items()),
    ],
)  # fmt: skip
def test_other_json_is_refused(tmp_path, change):
    (tmp_path / "e.json").write_text(json.dumps({**sample().to_dict(), **change}))
    with pytest.raises(CheckpointError):
        EvaluationResult.load(tmp_path / "e.json")


def test_evaluation_set_does_not_depend_on_order_and_nests():
    tasks = [f"game/{i}" for i in range(100)]
    choose = partial(EvaluationSet.choose, "e", "s")
    large = choose(tasks, 40, seed=1)
    assert choose(tasks[::-1], 40, seed=1) == large
    assert choose(tasks, 10, seed=1).task_ids == large.task_ids[:10]
    assert choose(tasks, 40, seed=2).digest != large.digest
    for count in (0, 101):
        with pytest.raises(EvaluationSetError):
            choose(tasks, count)


def test_keyword_arguments_are_part_of_a_protocol():
    settings = {"split": "generated", "families": ("pick_and_place_simple",)}
    (entry,) = GRPOConfig().environment("trial/ALFWorld-v0", env_config=settings).environment_entries()
    protocol = scripted_protocol(EvaluationSet("e", "s", ("a",)), entry)
    assert protocol["env_config"] == {"families": ["pick_and_place_simple"]}


# -- during training ---------------------------------------------------------------------------------------------------


def test_failed_evaluation_in_training_is_skipped_with_a_warning(caplog):
    def play(evaluation_set):
        if evaluation_set == "home":
            raise EnvironmentFaultError("the power is gone")
        return sample()

    algorithm = MagicMock(spec=GRPO, iteration=0, metrics=None, workers=MagicMock(), sampler=MagicMock())
    algorithm.evaluation_sets = {name: (name,) for name in ("home", "shop")}
    algorithm.evaluate_set, algorithm.evaluate_sets = play, partial(GRPO.evaluate_sets, algorithm)
    algorithm._evaluation_result = dict
    assert GRPO.evaluate(algorithm).keys() == {"shop"}, "no overall rates over another set of tasks"
    assert "no evaluation in home: the power is gone" in caplog.text
    with pytest.raises(EnvironmentFaultError):
        algorithm.evaluate_sets()
    algorithm.sampler.finish.side_effect = EngineError("no engine is left")  # which concerns groups of training
    with pytest.raises(EngineError):
        GRPO.evaluate(algorithm)


@pytest.mark.parametrize("call", [GRPO.step, GRPO.evaluate, GRPO.evaluate_sets])
def test_stopped_algorithm_refuses_calls_at_once(call):
    """It would wait for groups in flight whose env runners have ended."""
    algorithm = object.__new__(GRPO)
    algorithm.is_stopped = True
    with pytest.raises(UnsupportedError):
        call(algorithm)


@pytest.mark.parametrize("warns", [False, True])
def test_another_reference_than_at_the_start_is_reported(warns, caplog):
    def compare(ref_kl_coeff, dtype="float32", lora_rank=None):
        caplog.clear()
        config = GRPOConfig().rl_module(model_path="model", lora_rank=lora_rank).training(ref_kl_coeff=ref_kl_coeff)
        checksum = "b" if warns else "a"
        compare_initial_weights(config, {"checksum": "a", "dtype": "float32"}, {"checksum": checksum, "dtype": dtype})
        return bool(caplog.records)

    assert compare(0.01) == warns
    assert not compare(0.0)
    with pytest.raises(CheckpointError) if warns else nullcontext():
        compare(0.0, lora_rank=2)
    assert not compare(0.01, "bfloat16")


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "max_turns": 3,
        "top_p": 3,
        "sampling_seed": 3,
        "max_prompt_tokens": 3,
        "max_response_tokens": 3,
        "history_window": 3,
        "prompt_style": "other",
        "env_config": {},
        "adapter": {"skills": {"": "x"}},
        "chat_template": {"digest": "b" * 64},
        "rollouts": 2,
        "stop_strings": ["x"],
        "split": "s",
    }.items(),
)
def test_card_shows_what_another_protocol_changes(name, value):
    result = evaluation(
        [1, 0],
        max_turns=9,
        env_config={"difficulty": "tiny"},
        top_p=1.0,
        sampling_seed=0,
        max_prompt_tokens=512,
        max_response_tokens=16,
        history_window=2,
        prompt_style="plain",
        chat_template={"digest": "a" * 64, "kwargs": {"enable_thinking": False}},
    )
    other = replace(result, protocol={**result.protocol, name: value})
    assert protocol_card(other) != protocol_card(result)
    assert max(len(protocol_card(other)), len(protocol_card(result))) <= 8
