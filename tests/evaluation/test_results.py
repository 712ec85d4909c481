"""Evaluation results: rates, families, JSON and table; the sets of tasks; evaluations during training that fail."""

import json
import logging
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from evaluation_samples import evaluation
from rich.text import Text

from trial_ray.algorithms import GRPO, GRPOConfig
from trial_ray.algorithms.startup import compare_initial_weights
from trial_ray.errors import CheckpointError, EngineError, EnvironmentFaultError, UnsupportedError
from trial_ray.evaluation.evaluation_sets import EvaluationSet, EvaluationSetError
from trial_ray.evaluation.player import scripted_protocol
from trial_ray.evaluation.results import EvaluationResult, protocol_card
from trial_ray.trajectory import EpisodeResult


def sample():
    return EvaluationResult(
        {"env": "trial/ALFWorld-v0", "split": "valid_seen", "temperature": 0.4},
        [
            EpisodeResult("look/1", "look", True, 1.0, 4, "terminated"),
            EpisodeResult("look/2", "look", False, 0.0, 50, "turn_limit"),
            EpisodeResult("heat/1", "heat", True, 1.0, 12, "terminated"),
            EpisodeResult("heat/2", "heat", False, 0.0, 3, "failed"),
        ],
        policy="runs/a/checkpoints/000003",
    )


def test_failed_episodes_are_counted_apart():
    result = sample()
    assert result.success_rate == pytest.approx(2 / 3)
    assert result.num_failed == 1
    families = result.per_family()
    assert list(families) == ["heat", "look"]
    assert (families["heat"].successes, families["heat"].episodes) == (1, 1)
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


TASKS = [f"game/{i}" for i in range(100)]


def test_evaluation_set_does_not_depend_on_order_and_nests():
    large = EvaluationSet.choose("e", "s", TASKS, 40, seed=1)
    assert EvaluationSet.choose("e", "s", TASKS[::-1], 40, seed=1) == large
    assert EvaluationSet.choose("e", "s", TASKS, 10, seed=1).task_ids == large.task_ids[:10]
    assert EvaluationSet.choose("e", "s", TASKS, 40, seed=2).digest != large.digest
    for count in (0, 101):
        with pytest.raises(EvaluationSetError):
            EvaluationSet.choose("e", "s", TASKS, count)


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

    def lose_engines():
        raise EngineError("no engine is left")

    algorithm = SimpleNamespace(
        sampler=SimpleNamespace(finish=lambda: None),
        evaluation_sets={"home": ("home",), "shop": ("shop",)},
        evaluate_set=play,
        iteration=0,
        metrics=None,
        workers=SimpleNamespace(pop_logged=lambda in_evaluation: []),
        _phase=lambda name: nullcontext(),
        _require_running=lambda call: None,
        _call_back=lambda hook, **arguments: None,
        _log_callbacks=lambda logged, **where: None,
        _evaluation_result=lambda figures: {"env_runners": figures},
    )
    algorithm.evaluate_sets = partial(GRPO.evaluate_sets, algorithm)
    with caplog.at_level(logging.WARNING):
        figures = GRPO.evaluate(algorithm)["env_runners"]
    assert figures.keys() == {"shop"}, "no overall rates over another set of tasks"
    assert "no evaluation in home: the power is gone" in caplog.text
    with pytest.raises(EnvironmentFaultError):
        algorithm.evaluate_sets()
    algorithm.sampler.finish = lose_engines  # which concerns groups of training
    with pytest.raises(EngineError):
        GRPO.evaluate(algorithm)


@pytest.mark.parametrize("call", ["step", "evaluate", "evaluate_sets"])
def test_stopped_algorithm_refuses_calls_at_once(call):
    """It would wait for groups in flight whose env runners have ended."""
    algorithm = object.__new__(GRPO)
    algorithm.is_stopped = True
    with pytest.raises(UnsupportedError):
        getattr(algorithm, call)()


@pytest.mark.parametrize(("recorded", "warns"), [("a", False), ("b", True)])
def test_another_reference_than_at_the_start_is_reported(recorded, warns, caplog):
    def compare(ref_kl_coeff: float, dtype: str, lora_rank: int | None = None) -> bool:
        caplog.clear()
        config = GRPOConfig().rl_module(model_path="model", lora_rank=lora_rank).training(ref_kl_coeff=ref_kl_coeff)
        weights = {"checksum": "a", "dtype": "float32"}
        compare_initial_weights(config, weights, {"checksum": recorded, "dtype": dtype})
        return bool(caplog.records)

    assert compare(0.01, "float32") == warns
    assert not compare(0.0, "float32")
    with pytest.raises(CheckpointError) if warns else nullcontext():
        compare(0.0, "float32", lora_rank=2)
    assert not compare(0.01, "bfloat16")


PROTOCOL = {
    "max_turns": 9,
    "env_config": {"difficulty": "tiny"},
    "top_p": 1.0,
    "sampling_seed": 0,
    "max_prompt_tokens": 512,
    "max_response_tokens": 16,
    "history_window": 2,
    "prompt_style": "plain",
    "chat_template": {"digest": "a" * 64, "kwargs": {"enable_thinking": False}},
}


@pytest.mark.parametrize(
    "changed",
    [
        *(
            {name: "other" if isinstance(value, str) else 3}
            for name, value in PROTOCOL.items()
            if not isinstance(value, dict)
        ),
        {"env_config": {}},
        {"adapter": {"skills": {"": "x"}}},
        {"chat_template": {"digest": "b" * 64}},
        {"rollouts": 2},
        {"stop_strings": ["x"]},
        {"split": "s"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_card_shows_what_another_protocol_changes(changed):
    result = evaluation([1, 0], **PROTOCOL)
    other = replace(result, protocol={**result.protocol, **changed})
    assert protocol_card(other) != protocol_card(result)
    assert max(len(protocol_card(other)), len(protocol_card(result))) <= 8
