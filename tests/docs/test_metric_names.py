"""The table of metrics names what this package logs, all of it and nothing else."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS, LEARNER_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from small_learners import build_learner, update
from synthetic_groups import synthetic_groups

import trial_ray
from trial_ray.algorithms import GRPO, GRPOConfig, TRIALConfig
from trial_ray.algorithms.health_checks import HealthChecks
from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.algorithms.sampled_batch import SampledBatch
from trial_ray.algorithms.tasks import SuccessRateSampler
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.metrics import GROUPS, METRICS
from trial_ray.rollout.groups import GroupRequest, GroupSample

PACKAGE = str(Path(trial_ray.__file__).parent)


@contextmanager
def names_logged() -> Iterator[set[str]]:
    """Collect the names that code of this package gives to a metrics logger, ``/``-joined."""
    names: set[str] = set()

    def recording(log):
        def call(self, *args, **kwargs):
            if sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
                for name in args[0] if isinstance(args[0], dict) else args[:1]:
                    parts = ((part,) if isinstance(part, str) else part for part in (kwargs.get("key", ()), name))
                    names.add("/".join(itertools.chain(*parts)))
            return log(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for method in ("log_value", "log_time", "log_dict"):
            patch.setattr(MetricsLogger, method, recording(getattr(MetricsLogger, method)))
        yield names


def learner_names(model_path: str) -> set[str]:
    """Of two updates of every method; those of TRIAL's class log what it does."""
    groups = synthetic_groups(vocab_size=400, num_groups=1, group_size=2, max_turns=2)
    with names_logged() as found:
        for config in map(new_config, method_names()):
            if isinstance(config, TRIALConfig) and type(config) is not TRIALConfig:
                continue
            config.environment("trial/ALFWorld-v0").rl_module(model_path=model_path)
            learner = build_learner(config.training(max_logprob_diff=100.0, importance_cap=2.0))
            for iteration in (1, 2):
                update(learner, groups, iteration)
    # RLlib counts over all modules what it counts for each; there is one.
    return {f"{LEARNER_RESULTS}/{name}" for name in found if not name.startswith(ALL_MODULES)}


def driver_names() -> set[str]:
    """Of an iteration, with nothing but its counts, and of an evaluation set."""
    (group,) = synthetic_groups(vocab_size=400, num_groups=1)
    group.trajectories[0].rewards = {"NAME": 1.0}
    request = GroupRequest(0, group.task_id, len(group.trajectories), seed=0)
    sample = GroupSample.from_group(request, group, GRPOConfig())
    tasks = SuccessRateSampler([[group.task_id]], seed=0)
    tasks.note(sample)
    driver = SimpleNamespace(
        metrics=MetricsLogger(),
        sampler=SimpleNamespace(
            sample=lambda iteration: SampledBatch([sample], counts={0: sample.counts}, task_metrics=tasks.metrics()),
            runners_with_groups=lambda: (),
        ),
        config=GRPOConfig().environment("trial/ALFWorld-v0"),
        health_checks=HealthChecks(GRPOConfig()),
        workers=SimpleNamespace(
            numbers=lambda: (1, 1), adapt=lambda runners: None, pop_logged=lambda in_evaluation: []
        ),
        iteration=0,
        weights_checksum="",
        _weights_sent=True,
        _require_running=lambda call: None,
        _update=lambda samples: {},
        _sync_weights=lambda: None,
        _record_update=lambda timesteps, weights_before: None,
        evaluation_sets={"ALFWorld-v0": ()},
        evaluate_sets=lambda skip_failed: {"ALFWorld-v0": EvaluationResult({}, counts=sample.counts)},
        _log_callbacks=lambda logged, **where: None,
        _call_back=lambda hook, **arguments: None,
        _evaluation_result=lambda figures: {ENV_RUNNER_RESULTS: figures},
    )
    driver._phase = partial(GRPO._phase, driver)
    driver._log_batch = partial(GRPO._log_batch, driver)
    with names_logged() as found:
        GRPO.training_step(driver)
        played = GRPO.evaluate(driver)[ENV_RUNNER_RESULTS]
    return found | {f"{EVALUATION_RESULTS}/{ENV_RUNNER_RESULTS}/{name}" for name in played}


def test_table_has_exactly_the_logged_metrics(model_path):
    logged = learner_names(model_path) | driver_names()
    of_rllib = {metric.name for group in GROUPS if group.name == "rllib" for metric in group.metrics}
    assert not logged - METRICS.keys(), f"logged, but not in the table: {sorted(logged - METRICS.keys())}"
    assert not METRICS.keys() - logged - of_rllib, f"not logged: {sorted(METRICS.keys() - logged - of_rllib)}"
