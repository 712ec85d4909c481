"""Configurations refuse what cannot be trained, before any actor starts."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from trial_ray.algorithms import GRPO, GRPOConfig, TRIALConfig, methods
from trial_ray.algorithms.methods import config_class, method_names, method_title, new_config
from trial_ray.algorithms.rllib_settings import UNREAD, refuse_unread
from trial_ray.errors import ConfigError
from trial_ray.runs.experiment import load_experiment

EXAMPLES = Path(__file__).parents[2] / "tuned_examples"


def valid_config() -> TRIALConfig:
    return TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="anything")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size is 1.*at least 2"),
        ({"hindsight_coeff": -0.1}, "hindsight_coeff is -0.1.*at least 0"),
        ({"privileged_view": "outcom"}, "privileged_view is 'outcom'.*'outcome'"),
        ({"privileged_view": None}, "needs a second view"),
        ({"minibatch_rows": 16}, "minibatch_rows is 16, below microbatch_rows, which is 32"),
        ({"max_refills": 2}, "set drop_zero_variance_groups too"),
        ({"importance_cap": 0.9}, "importance_cap is 0.9.*at least 1"),
        ({"importance_mode": "sequence_mask"}, "importance_cap is None, so that nothing is weighed"),
        ({"importance_mode": "mask"}, "importance_mode is 'mask'.*'token_truncate'"),
        ({"ratio_level": "row"}, "ratio_level is 'row'.*'sequence'"),
        ({"surrogate_mean": "token"}, "surrogate_mean is 'token'.*'fixed_length'"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        valid_config().training(**settings).validate()


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_of_rllibs_that_nothing_reads_is_refused_with_what_to_set(name):
    config = valid_config()
    before = getattr(config, name, None)
    changed = {
        bool: lambda: not before,
        int: lambda: before + 1,
        float: lambda: before / 2,
        str: lambda: f"not {before}",
    }
    setattr(config, name, changed.get(type(before), lambda: {"a": 1})())
    with pytest.raises(ConfigError) as raised:
        refuse_unread(config)
    assert str(raised.value).startswith(f"Nothing reads RLlib's {name}, which is ")
    assert str(raised.value).endswith(f": {UNREAD[name]}.")


def test_rllibs_sections_name_the_settings_that_nothing_reads():
    with pytest.raises(ConfigError, match=r"train_batch_size_per_learner, which is 64: .* set tasks_per_iteration"):
        valid_config().training(train_batch_size_per_learner=64).validate()
    with pytest.raises(
        ConfigError, match=r"on_evaluate_offline_end, which is .*never called: nothing is evaluated offline"
    ):
        valid_config().callbacks(on_evaluate_offline_end=print).validate()
    valid_config().evaluation(evaluation_interval=1).get_evaluation_config_object().validate()


@pytest.mark.parametrize("seed", [-1, 2**32, 2**32 - 1, 1.5, True, "7"])
def test_a_seed_that_actors_could_not_use_is_refused(seed):
    with pytest.raises(ConfigError, match=f"seed is {seed!r}, expected an int of at least 0 and at most 4292967296"):
        valid_config().debugging(seed=seed).validate()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0, expected a finite value of at least 0.01: greedy"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.9}, "top_p is 0.9, expected 1: .*no correction"),
    ],
)
def test_training_on_another_distribution_than_the_sampled_one_is_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        valid_config().env_runners(**sampling).validate()
    valid_config().evaluation(evaluation_temperature=0.0, evaluation_top_p=0.9).validate()
    with pytest.raises(ConfigError, match=r"evaluation_temperature is 0.001, expected 0 \(greedy\) or at least 0.01"):
        valid_config().evaluation(evaluation_temperature=0.001).validate()


@pytest.mark.parametrize(
    ("rollouts", "training", "message"),
    [
        ({"max_staleness": -1}, {}, "max_staleness is -1.*at least 0"),
        ({"max_staleness": 1}, {}, "importance_cap is None.*importance_cap=2.0"),
        ({"min_effective_sample_size": 1.5}, {}, r"min_effective_sample_size is 1.5.*\[0, 1\]"),
        (
            {"max_staleness": 2},
            {"importance_cap": 2.0, "drop_zero_variance_groups": True, "max_refills": 1},
            "max_refills is 1, expected 0 with max_staleness=2",
        ),
    ],
)
def test_sampling_ahead_without_what_it_needs_is_refused(rollouts, training, message):
    with pytest.raises(ConfigError, match=message):
        valid_config().env_runners(**rollouts).training(**training).validate()


def test_sampling_ahead_needs_an_env_runner_and_takes_groups_without_variance():
    config = valid_config().env_runners(max_staleness=1).training(importance_cap=2.0, drop_zero_variance_groups=True)
    config.validate()
    with pytest.raises(ConfigError, match="max_staleness is 1, but num_env_runners is 0"):
        config.env_runners(num_env_runners=0).validate()
    valid_config().training(importance_cap=1.0).validate()


def test_engines_with_too_short_a_context_are_refused():
    config = valid_config().env_runners(max_prompt_tokens=400, max_response_tokens=100)
    config.engines(engine_kwargs={"max_model_len": 500}).validate()
    with pytest.raises(ConfigError, match=r"max_model_len=499 found, at least 500 expected \(max_prompt_tokens plus"):
        config.engines(engine_kwargs={"max_model_len": 499}).validate()


def test_more_learners_than_trajectories_are_refused():
    config = valid_config().training(group_size=2, tasks_per_iteration=2).learners(num_learners=5)
    with pytest.raises(ConfigError, match=r"num_learners is 5.*at most 4 trajectories.*at least one for each learner"):
        config.validate()
    config.learners(num_learners=4).validate()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("rlsd", {"privileged_view": None}, "RLSDConfig needs a second view"),
        ("serl", {"privileged_view": None}, "SERLConfig needs a second view|without a privileged_view"),
        ("grpo_opsd", {"gate_slope": 5.0}, "use sdar"),
        ("opsd", {"jsd_mix": 1.0}, "jsd_mix is 1.0"),
        ("grpo", {"teacher_sync_iterations": 10}, "without a privileged_view no teacher"),
    ],
)
def test_methods_refuse_values_out_of_range(method, settings, message):
    config = new_config(method).environment("trial/ALFWorld-v0").rl_module(model_path="anything").training(**settings)
    with pytest.raises(ConfigError, match=message):
        config.validate()


def test_every_config_of_a_methods_file_is_found_by_a_name_and_has_a_title():
    files = [file.stem for file in Path(methods.__file__).parent.glob("[!_]*.py")]
    modules = [import_module(f"{methods.__name__}.{file}") for file in files]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    configs = {each for each in found if issubclass(each, GRPOConfig)}
    assert configs == {config_class(name) for name in method_names()}
    assert [method_title(name) for name in ("grpo_opsd", "gigpo", "my/own.py")] == ["GRPO+OPSD", "GiGPO", "my/own.py"]


def test_a_misspelt_key_names_the_nearest_known_one():
    config = TRIALConfig().update_from_dict({"hindsite_coeff": 0.3})
    with pytest.raises(ConfigError, match=r"'hindsite_coeff'.*'hindsight_coeff'"):
        config.validate()


def test_exactly_one_source_of_the_policy_is_needed():
    with pytest.raises(ConfigError, match="exactly one"):
        TRIALConfig().environment("trial/ALFWorld-v0").validate()
    with pytest.raises(ConfigError, match="exactly one"):
        valid_config().rl_module(warm_start={}).validate()


def test_a_warm_start_is_refused_where_prompts_are_conversations():
    conversations = valid_config().env_runners(prompt_style="conversation")
    conversations.validate()
    with pytest.raises(ConfigError, match=r"prompt_style is 'conversation'.*'tagged' or 'plain'.*model_path"):
        conversations.rl_module(model_path=None, warm_start={}).validate()


def test_an_unknown_engine_is_refused():
    with pytest.raises(ConfigError, match="engine is 'vlm'"):
        valid_config().engines(engine="vlm").validate()


def test_missing_data_is_told_before_anything_starts(monkeypatch, tmp_path):
    config = valid_config().environment(env_config={"split": "valid_seen", "data": str(tmp_path / "nowhere")})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GRPO._choose_panels(_Stub(config.evaluation(evaluation_split="valid_seen", evaluation_num_tasks=2)))


class _Stub:
    def __init__(self, config):
        self.config = config


def test_cpus_of_an_engine_are_no_custom_resource():
    with pytest.raises(ConfigError, match="num_cpus_per_engine"):
        valid_config().engines(custom_resources_per_engine={"CPU": 1}).validate()


def test_the_clean_up_after_a_setup_that_failed_early_hides_no_error():
    object.__new__(GRPO).cleanup()


@pytest.mark.parametrize("name", ["alfworld_qwen3_1.7b", "alfworld_qwen2.5_3b"])
def test_paper_examples_hold_table_1(name):
    experiment = load_experiment(EXAMPLES / f"{name}.py")
    config = experiment.config
    config.validate()
    assert experiment.stop == {"training_iteration": 150}
    published = {
        "tasks_per_iteration": 16,
        "group_size": 8,
        "minibatch_rows": 256,
        "microbatch_rows": 32,
        "max_prompt_tokens": 2048,
        "max_response_tokens": 512,
        "hindsight_coeff": 0.01,
        "gap_clip": 2.0,
        "hindsight_start_iteration": 25,
        "clamp_alpha": 1.0,
        "lr": 1e-6,
    }
    assert {key: getattr(config, key) for key in published} == published
    assert config.env_config["max_turns"] == 50


@pytest.mark.parametrize(
    "file",
    [
        *sorted(EXAMPLES.glob("alfworld_*.py")),
        EXAMPLES / "textarena_frozen_lake.py",
        EXAMPLES / "reasoning_gym_chain_sum.py",
    ],
    ids=lambda file: file.stem,
)
def test_every_example_is_a_valid_config(file):
    config = load_experiment(file).config
    assert isinstance(config, GRPOConfig)
    config.validate()
    config.require_schedules_within(load_experiment(file).stop["training_iteration"])
    json.dumps(config.env_config)


@pytest.mark.parametrize(
    ("model", "compute", "gpus", "dtype", "limit"),
    [
        ("float32", None, 0, "float32", 1e-3),
        ("float64", None, 0, "float64", 1e-3),
        ("bfloat16", None, 0, "bfloat16", 0.1),
        ("bfloat16", "float32", 1, "bfloat16", 0.1),
        ("float32", "float32", 1, "float32", 1e-3),
        ("float32", None, 1, "bfloat16", 0.1),
    ],
)
def test_the_gap_to_the_engine_is_that_of_the_type_in_which_the_passes_compute(model, compute, gpus, dtype, limit):
    config = GRPOConfig().rl_module(model_dtype=model, compute_dtype=compute).learners(num_gpus_per_learner=gpus)
    config.engines(engine_kwargs={"dtype": "float32"})
    assert config.passes_dtype() == dtype
    assert config.logprob_gap_limit() == limit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute_dtype": "float16"}, "compute_dtype .*'float16'.*'float32', 'bfloat16'"),
        ({"compute_dtype": "float64"}, "compute_dtype .*'float64'.*'float32', 'bfloat16'"),
        ({"model_dtype": "float16"}, "model_dtype .*'float16'.*'float32', 'bfloat16', 'float64'"),
        ({"model_dtype": "float64", "compute_dtype": "bfloat16"}, r"set .rl_module\(compute_dtype='float32'\)"),
    ],
)
def test_types_in_which_gradients_underflow_or_passes_fail_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig().environment("trial/ALFWorld-v0").rl_module(model_path="model", **settings).validate()
