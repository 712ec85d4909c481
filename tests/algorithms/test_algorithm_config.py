"""Configurations refuse what cannot be trained, before any actor starts."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from trial_ray.algorithms import GRPOConfig, TRIALConfig, methods
from trial_ray.algorithms.methods import config_class, method_title, new_config
from trial_ray.algorithms.rllib_settings import UNREAD, refuse_unread
from trial_ray.errors import ConfigError
from trial_ray.runs.experiment import load_experiment

EXAMPLES = Path(__file__).parents[2] / "tuned_examples"


def valid_config() -> TRIALConfig:
    return TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="anything")


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("training", {"teacher_context": None}, "needs a teacher.*teacher_model"),
        ("training", {"minibatch_rows": 16}, "minibatch_rows is 16, below microbatch_rows, which is 32"),
        ("training", {"max_refills": 2}, "Set drop_zero_variance_groups too"),
        ("training", {"importance_mode": "sequence_mask"}, "importance_cap is None, so no token is weighted"),
        ("training", {"reward_weights": {"form": 0.5}}, "parts of a reward function, but reward is 'success'"),
        ("training", {"lr": -1e-4}, "lr is -0.0001, expected a finite number of at least 0"),
        ("training", {"lr": [[0, 1e-4], [10, float("nan")]]}, "lr is .*nan.*, expected a finite number"),
        ("training", {"grad_clip": -1}, "grad_clip is -1, expected a finite number above 0, or None"),
        ("training", {"adam_betas": (0.9, 1.5)}, "adam_betas .*two numbers in"),
        ("training", {"reward": lambda _: 0.0, "reward_weights": {"form": "2"}}, "expected finite numbers by name"),
        ("learners", {"num_learners": "2"}, "num_learners is '2', expected a whole number"),
        ("evaluation", {"evaluation_interval": 10}, "evaluation_split is None, so there is nothing to play"),
        ("env_runners", {"temperature": 0.0}, r"temperature is 0.0, expected a value in \[0.01, 2.0\]"),
        ("env_runners", {"temperature": 2.5}, r"temperature is 2.5, expected a value in \[0.01, 2.0\]"),
        ("env_runners", {"top_p": 0.9}, "top_p is 0.9, expected 1: .*no correction"),
        ("env_runners", {"max_staleness": 1}, "importance_cap is None.*importance_cap=2.0"),
        ("evaluation", {"evaluation_temperature": 0.001}, r"is 0.001, expected 0 \(greedy\) or a value in"),
        ("rl_module", {"compute_dtype": "float16"}, "compute_dtype .*'float16'.*'float32', 'bfloat16'"),
        ("rl_module", {"model_dtype": "float64", "compute_dtype": "bfloat16"}, r"rl_module\(compute_dtype='float32'\)"),
        ("rl_module", {"warm_start": {}}, "exactly one"),
        ("rl_module", {"model_path": None}, "exactly one"),
        ("training", {"reward": lambda prompts, completions: 0.0}, "cannot be called with one argument, the episode"),
        (
            "training",
            {"reward": type("Größe", (), {"__call__": lambda self, episode: 0.0})()},
            "function is called 'Größe'",
        ),
        (
            "training",
            {"learner_class": TorchLearner},
            "learner_class is TorchLearner, expected a class derived from GRPO",
        ),
        ("training", {"learner_class": "x.y"}, "learner_class is 'x.y', expected a class derived from GRPOLearner"),
        ("env_runners", {"env_runner_cls": SingleAgentEnvRunner}, "env_runner_cls is SingleAgentEnvRunner, expected"),
        (
            "rl_module",
            {"rl_module_spec": RLModuleSpec(module_class=TorchRLModule)},
            "module_class is TorchRLModule, exp",
        ),
        ("multi_agent", {"policies": {"a", "b"}}, r"has the policies \['a', 'b'\], but one policy is trained"),
        (
            "training",
            {"train_batch_size_per_learner": 64},
            "RLlib's train_batch_size_per_learner is 64, but has no effect",
        ),
        ("debugging", {"seed": -1}, "seed is -1, expected an int of at least 0 and at most 4292967296"),
    ],
)
def test_what_cannot_be_trained_is_refused(section, settings, message):
    with pytest.raises(ConfigError, match=message):
        getattr(valid_config(), section)(**settings).validate()


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_of_rllib_that_nothing_reads_is_refused(name):
    config = valid_config()
    setattr(config, f"_{name}" if f"_{name}" in vars(config) else name, object())
    with pytest.raises(ConfigError, match=f"RLlib's {name} is .*, but has no effect here: {re.escape(UNREAD[name])}"):
        refuse_unread(config)


def test_sampling_ahead_needs_an_env_runner_and_cannot_refill():
    config = valid_config().env_runners(max_staleness=1).training(importance_cap=2.0, drop_zero_variance_groups=True)
    config.validate()
    with pytest.raises(ConfigError, match="max_staleness is 1, but num_env_runners is 0"):
        config.env_runners(num_env_runners=0).validate()
    refills = config.env_runners(num_env_runners=1).training(max_refills=1)
    with pytest.raises(ConfigError, match="max_refills is 1, expected 0 with max_staleness=1"):
        refills.validate()
    valid_config().evaluation(evaluation_temperature=0.0, evaluation_top_p=0.9).validate()


def test_more_learners_than_trajectories_are_refused():
    config = valid_config().training(group_size=2, tasks_per_iteration=2).learners(num_learners=5)
    with pytest.raises(ConfigError, match=r"num_learners is 5.*at most 4 trajectories.*at least one for each learner"):
        config.validate()
    config.learners(num_learners=4).validate()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("serl", {"teacher_context": None}, "SERLConfig needs a teacher"),
        ("grpo_opsd", {"gate_slope": 5.0}, "use sdar"),
        ("opsd", {"jsd_mix": 1.1}, "jsd_mix is 1.1"),
        ("rft", {"advantage_estimator": "rloo"}, "RFTConfig has advantages of its own"),
        ("hgpo", {"advantage_norm": "batch_norm"}, "HGPOConfig has advantages of its own"),
        ("trial", {"advantage_estimator": "max_rl", "advantage_statistics": "rows"}, "counts once per turn"),
        ("trial", {"policy_loss": "cispo", "ratio_level": "sequence"}, "Set ratio_level='token'"),
        ("grpo", {"teacher_sync_iterations": 10}, "teacher_context is None, so there is no teacher"),
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
    assert configs == {config_class(name) for name in methods.METHODS}
    assert [method_title(name) for name in ("gigpo", "my/own.py")] == ["GiGPO", "my/own.py"]


def test_a_warm_start_is_refused_where_prompts_are_conversations():
    conversations = valid_config().env_runners(prompt_style="conversation")
    conversations.validate()
    with pytest.raises(ConfigError, match=r"prompt_style is 'conversation'.*'tagged' or 'plain'.*model_path"):
        conversations.rl_module(model_path=None, warm_start={}).validate()


@pytest.mark.parametrize("name", ["alfworld_qwen3_1.7b", "alfworld_qwen2.5_3b"])
def test_paper_examples_hold_table_1(name):
    experiment = load_experiment(EXAMPLES / f"{name}.py")
    config = experiment.config
    assert experiment.stop == {"training_iteration": 150}
    sizes = (config.tasks_per_iteration, config.group_size, config.minibatch_rows, config.microbatch_rows)
    assert (*sizes, config.max_prompt_tokens, config.max_response_tokens) == (16, 8, 256, 32, 2048, 512)
    method = (config.hindsight_coeff, config.gap_clip, config.hindsight_start_iteration, config.clamp_alpha)
    assert (*method, config.lr, config.env_config["max_turns"]) == (0.01, 2.0, 25, 1.0, 1e-6, 50)


@pytest.mark.parametrize(
    "file",
    [
        *sorted(EXAMPLES.glob("alfworld_*.py")),
        EXAMPLES / "textarena_frozen_lake.py",
        EXAMPLES / "reasoning_gym_chain_sum.py",
        EXAMPLES / "reward_functions.py",
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
        ("bfloat16", None, 0, "bfloat16", 0.1),
        ("bfloat16", "float32", 1, "bfloat16", 0.1),
        ("float32", None, 1, "bfloat16", 0.1),
    ],
)
def test_the_gap_to_the_engine_is_that_of_the_type_of_the_passes(model, compute, gpus, dtype, limit):
    config = GRPOConfig().rl_module(model_dtype=model, compute_dtype=compute).learners(num_gpus_per_learner=gpus)
    config.engines(engine_kwargs={"dtype": "float32"})
    assert config.passes_dtype() == dtype
    assert config.logprob_diff_limit() == limit
