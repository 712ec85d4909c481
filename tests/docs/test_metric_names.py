"""The table of metrics names what this package logs, all of it and nothing else."""

import itertools
import sys
from contextlib import contextmanager

import pytest
from ray.rllib.core import ALL_MODULES, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import EVALUATION_RESULTS, LEARNER_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from small_learners import build_learner, update
from synthetic_groups import synthetic_groups
from tiny_run import ChanceEnv, config_of
from user_env import registered

from trial_ray import OPDConfig, TRIALConfig
from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.files import PACKAGE
from trial_ray.metrics import ENV_RUNNERS, GROUPS, METRICS
from trial_ray.rollout.groups import RolloutCounts
from trial_ray.runs.metrics_file import flatten


@contextmanager
def names_logged():
    """Collect the names that code of this package gives to a metrics logger, ``/``-joined."""
    names = set()

    def recording(log):
        def call(self, *args, **kwargs):
            if sys._getframe(1).f_code.co_filename.startswith(str(PACKAGE)):
                for name in args[0] if isinstance(args[0], dict) else args[:1]:
                    parts = ((part,) if isinstance(part, str) else part for part in (kwargs.get("key", ()), name))
                    names.add("/".join(itertools.chain(*parts)))
            return log(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for method in ("log_value", "log_time", "log_dict"):
            patch.setattr(MetricsLogger, method, recording(getattr(MetricsLogger, method)))
        yield names


def learner_names(model_path):
    """Of two updates of every method; those of TRIAL's class log what it does."""
    groups = synthetic_groups(vocab_size=400, num_groups=1, group_size=2, max_turns=2)
    with names_logged() as found:
        for config in map(new_config, method_names()):
            if isinstance(config, TRIALConfig) and type(config) is not TRIALConfig:
                continue
            config.environment("trial/ALFWorld-v0").rl_module(model_path=model_path)
            if isinstance(config, OPDConfig):
                config.training(curriculum_iterations=2)
            teacher = None if config.teacher_sync_iterations else model_path
            learner = build_learner(config.training(teacher_model=teacher, max_logprob_diff=100.0, importance_cap=2.0))
            for iteration in (1, 2):
                update(learner, groups, iteration)
    # RLlib counts over all modules what it counts for each; there is one.
    return {f"{LEARNER_RESULTS}/{name}" for name in found if not name.startswith(ALL_MODULES)}


def driver_names(algorithm_of, model_path):
    """Of an iteration and of an evaluation set."""
    config = config_of(model_path, task_sampling="success_rate")
    config.env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
    config.evaluation(evaluation_split="train", evaluation_num_tasks=2)
    with registered(ChanceEnv), names_logged() as found:
        algo = algorithm_of(config)
        algo.train()
        played = flatten({EVALUATION_RESULTS: algo.evaluate()})
    of_learner = (ALL_MODULES, DEFAULT_MODULE_ID)  # which works in this process
    return {*played, *(name for name in found if not name.startswith(of_learner))}


@pytest.mark.actors
def test_table_has_exactly_the_logged_metrics(model_path, algorithm_of):
    logged = learner_names(model_path) | driver_names(algorithm_of, model_path)
    logged |= {f"{ENV_RUNNERS}{name}" for name in RolloutCounts(turns=1, called_tokens=1).metrics()}  # of programs
    of_rllib = {metric.name for group in GROUPS if group.name == "rllib" for metric in group.metrics}
    assert logged <= METRICS.keys()
    assert {name for name in METRICS.keys() - logged - of_rllib if "rewards/NAME" not in name} == set()
