"""Configurations refuse what cannot be trained, before any actor starts."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from rejections import misconfigured
from small_learners import config_of

from trial_ray.algorithms import GRPOConfig, methods
from trial_ray.algorithms.methods import config_class, method_title
from trial_ray.algorithms.rllib_settings import UNREAD, refuse_unread, stored_name
from trial_ray.runs.experiment import load_experiment

EXAMPLES = Path(__file__).parents[2] / "tuned_examples"


AHEAD = {"max_staleness": 1, "importance_cap": 2.0}
FOUR = {"tasks_per_iteration": 2, "group_size": 2}
"""Settings with which an iteration samples four trajectories."""


def config_with(method="trial", **settings):
    config = config_of(method, "anything")
    for name, value in settings.items():
        setattr(config, stored_name(name, vars(config)), value)
    return config


@pytest.mark.parametrize(
    ("message", "settings"),
    {
        "needs a teacher.*teacher_model": {"teacher_context": None},
        "minibatch_rows is 16, below microbatch_rows, which is 32": {"minibatch_rows": 16},
        "Set drop_zero_variance_groups too": {"max_refills": 2},
        "importance_cap is None, so no token is weighted": {"importance_mode": "sequence_mask"},
        "parts of a reward function, but reward is 'success'": {"reward_weights": {"form": 0.5}},
        "lr is -0.0001, expected a finite number of at least 0": {"lr": -1e-4},
        "lr is .*nan.*, expected a finite number": {"lr": [[0, 1e-4], [10, float("nan")]]},
        "grad_clip is -1, expected a finite number above 0, or None": {"grad_clip": -1},
        "grad_clip is 0, expected a finite number above 0, or None": {"grad_clip": 0},
        "adam_betas .*two numbers in": {"adam_betas": (0.9, 1.5)},
        "expected finite numbers by name": {"reward": lambda _: 0.0, "reward_weights": {"form": "2"}},
        "num_learners is '2', expected a whole number": {"num_learners": "2"},
        "evaluation_split is None, so there is nothing to play": {"evaluation_interval": 10},
        r"temperature is 0.0, expected a value in \[0.01, 2.0\]": {"temperature": 0.0},
        r"temperature is 2.5, expected a value in \[0.01, 2.0\]": {"temperature": 2.5},
        "top_p is 0.9, expected 1: .*no correction": {"top_p": 0.9},
        "importance_cap is None.*importance_cap=2.0": {"max_staleness": 1},
        "max_staleness is 1, but num_env_runners is 0": {**AHEAD, "num_env_runners": 0},
        "max_refills is 1, expected 0 with max_staleness=1": {
            **AHEAD,
            "drop_zero_variance_groups": True,
            "max_refills": 1,
        },
        "num_learners is 5.*at most 4 trajectories.*at least one for each learner": {**FOUR, "num_learners": 5},
        "prompt_style is 'conversation'.*'tagged' or 'plain'.*model_path": {
            "prompt_style": "conversation",
            "model_path": None,
            "warm_start": {},
        },
        r"is 0.001, expected 0 \(greedy\) or a value in": {"evaluation_temperature": 0.001},
        "compute_dtype .*'float16'.*'float32', 'bfloat16'": {"compute_dtype": "float16"},
        r"rl_module\(compute_dtype='float32'\)": {"model_dtype": "float64", "compute_dtype": "bfloat16"},
        "exactly one of .*warm_start": {"warm_start": {}},
        "exactly one of .*model_path": {"model_path": None},
        "cannot be called with one argument, the episode": {"reward": lambda prompts, completions: 0.0},
        "function is called 'Größe'": {"reward": type("Größe", (), {"__call__": lambda self, episode: 0.0})()},
        "learner_class is TorchLearner, expected a class derived from GRPO": {"learner_class": TorchLearner},
        "learner_class is 'x.y', expected a class derived from GRPOLearner": {"learner_class": "x.y"},
        "env_runner_cls is SingleAgentEnvRunner, expected": {"env_runner_cls": SingleAgentEnvRunner},
        "module_class is TorchRLModule, exp": {"rl_module_spec": RLModuleSpec(module_class=TorchRLModule)},
        "RLlib's train_batch_size_per_learner is 64, but has no effect": {"train_batch_size_per_learner": 64},
        "seed is -1, expected an int of at least 0 and at most 4292967296": {"seed": -1},
        "SERLConfig needs a teacher": {"method": "serl", "teacher_context": None},
        "use sdar": {"method": "grpo_opsd", "gate_slope": 5.0},
        "chat_template_date is '31 January', expected a day": {"chat_template_date": "31 January"},
        "jsd_mix is 1.1": {"method": "opsd", "jsd_mix": 1.1},
        "RFTConfig has advantages of its own": {"method": "rft", "advantage_estimator": "rloo"},
        "HGPOConfig has advantages of its own": {"method": "hgpo", "advantage_norm": "batch_norm"},
        "counts once per turn": {"advantage_estimator": "max_rl", "advantage_statistics": "rows"},
        "Set ratio_level='token'": {"policy_loss": "cispo", "ratio_level": "sequence"},
        "teacher_context is None, so there is no teacher": {"method": "grpo", "teacher_sync_iterations": 10},
    }.items(),
)
def test_what_cannot_be_trained_is_refused(settings, message):
    misconfigured(message, config_with(**settings).validate)


@pytest.mark.parametrize(
    "settings",
    [
        {**AHEAD, "drop_zero_variance_groups": True},
        {"evaluation_temperature": 0.0, "evaluation_top_p": 0.9},
        {**FOUR, "num_learners": 4},
        {"prompt_style": "conversation"},
    ],
)
def test_what_can_be_trained_is_valid(settings):
    assert settings.keys() <= vars(config_with()).keys()
    config_with(**settings).validate()


def test_several_policies_are_refused():
    config = config_with().multi_agent(policies={"a", "b"})
    misconfigured(r"has the policies \['a', 'b'\], but one policy is trained", config.validate)


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_of_rllib_that_nothing_reads_is_refused(name):
    words = f"RLlib's {name} is .*, but has no effect here: {re.escape(UNREAD[name])}"
    misconfigured(words, refuse_unread, config_with(**{name: object()}))


def test_every_config_of_a_methods_file_is_found_by_a_name_and_has_a_title():
    files = Path(methods.__file__).parent.glob("[!_]*.py")
    found = [each for file in files for each in vars(import_module(f"{methods.__name__}.{file.stem}")).values()]
    configs = {each for each in found if isinstance(each, type) and issubclass(each, GRPOConfig)}
    assert configs == {config_class(name) for name in methods.METHODS}
    assert [method_title(name) for name in ("gigpo", "my/own.py")] == ["GiGPO", "my/own.py"]


TABLE_1 = {
    "tasks_per_iteration": 16, "group_size": 8, "minibatch_rows": 256, "microbatch_rows": 32, "max_prompt_tokens": 2048,
    "max_response_tokens": 512, "hindsight_coeff": 0.01, "gap_clip": 2.0, "hindsight_start_iteration": 25, "clamp_alpha": 1.0,
    "lr": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", ["alfworld_qwen3_1.7b", "alfworld_qwen2.5_3b"])
def test_paper_examples_hold_table_1(name):
    experiment = load_experiment(EXAMPLES / f"{name}.py")
    config = experiment.config
    assert experiment.stop == {"training_iteration": 150}
    assert config.env_config["max_turns"] == 50
    assert TABLE_1.items() <= vars(config).items()


@pytest.mark.parametrize(
    "name",
    [
        *sorted(file.stem for file in EXAMPLES.glob("alfworld_*.py")),
        "textarena_frozen_lake",
        "reasoning_gym_chain_sum",
        "reward_functions",
    ],
)
def test_every_example_is_a_valid_config(name):
    experiment = load_experiment(EXAMPLES / f"{name}.py")
    config = experiment.config
    config.validate()
    config.require_schedules_within(experiment.stop["training_iteration"])
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
