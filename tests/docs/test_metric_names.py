"""The tables of logged metrics name what this package logs, all of it and nothing else; RLlib's own metrics are not in them."""

from __future__ import annotations

import re
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
from snippets import DOCS
from synthetic_groups import synthetic_groups

import trial_ray
from trial_ray.algorithms import GRPO, GRPOConfig
from trial_ray.algorithms.batch_sampler import SampledBatch
from trial_ray.algorithms.guards import Guards
from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.experiments.metric_names import KNOWN, PROGRESS
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.requests import GroupSample

PACKAGE = str(Path(trial_ray.__file__).parent)


@contextmanager
def names_logged() -> Iterator[set[str]]:
    """Collects the names that code of this package gives to a metrics logger, ``/``-joined."""
    found: set[str] = set()
    log_value, log_dict, log_time = MetricsLogger.log_value, MetricsLogger.log_dict, MetricsLogger.log_time

    def note(key, *more: str) -> None:
        if sys._getframe(2).f_code.co_filename.startswith(PACKAGE):
            parts = (key,) if isinstance(key, str) else key
            found.add("/".join([*parts, *more]))

    def noting_value(self, key, *args, **kwargs):
        note(key)
        return log_value(self, key, *args, **kwargs)

    def noting_dict(self, values, *args, key=(), **kwargs):
        for name in values:
            note(key, name)
        return log_dict(self, values, *args, key=key, **kwargs)

    def noting_time(self, key, *args, **kwargs):
        note(key)
        return log_time(self, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLogger, "log_value", noting_value)
        patch.setattr(MetricsLogger, "log_time", noting_time)
        patch.setattr(MetricsLogger, "log_dict", noting_dict)
        yield found


def learner_names(model_path: str) -> set[str]:
    """Of one update of every method."""
    groups = synthetic_groups(vocab_size=400, num_groups=1, group_size=2, most_turns=2)
    with names_logged() as found:
        for method in method_names():
            config = new_config(method).environment("trial/ALFWorld-v0").policy(model_path=model_path)
            update(build_learner(config.training(max_logprob_gap=100.0)), groups)
    # RLlib counts over all modules what it counts for each; there is one.
    return {f"{LEARNER_RESULTS}/{name}" for name in found if not name.startswith(ALL_MODULES)}


def runner_names() -> set[str]:
    """Of groups that an env runner has played."""
    runner = TextEnvRunner(config=GRPOConfig().environment("trial/ALFWorld-v0"), env_creator=None)
    with names_logged() as found:
        runner._log(synthetic_groups(vocab_size=400, num_groups=1))
    return {f"{ENV_RUNNER_RESULTS}/{name}" for name in found}


def driver_names() -> set[str]:
    """Of an iteration, with nothing but its counts, and of a panel."""
    sample = GroupSample(None, None, [], [], num_survivors=4, num_rows=10, zero_variance=False)
    driver = SimpleNamespace(
        metrics=MetricsLogger(),
        sampler=SimpleNamespace(sample=lambda iteration: SampledBatch([sample])),
        guards=Guards(GRPOConfig()),
        iteration=0,
        weights_checksum="",
        _update=lambda samples: {},
        _sync_weights=lambda: None,
        _record_update=lambda timesteps, weights_before: None,
        evaluate_panels=lambda: {"ALFWorld-v0": EvaluationResult({})},
    )
    driver._phase = partial(GRPO._phase, driver)
    with names_logged() as found:
        GRPO.training_step(driver)
        played = GRPO.evaluate(driver)[ENV_RUNNER_RESULTS]
    return found | {f"{EVALUATION_RESULTS}/{ENV_RUNNER_RESULTS}/{name}" for name in played}


def documented(page: str) -> set[str]:
    """First cells of the tables under "Logged metrics", each with the path that the words before its table give."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = re.search(r"^## Logged metrics\n(.*?)^## ", text, re.M | re.S)[1]
    found: list[str] = []
    for words, table in re.findall(r"((?:^[^|\n].*\n|^\n)+)((?:^\|.*\n)+)", section, re.M):
        path = re.search(r"`([\w/]+/)`", words)
        for row in table.splitlines()[2:]:
            found += [(path[1] if path else "") + name for name in re.findall(r"`([\w/]+)`", row.split("|")[1])]
    assert len(found) == len(set(found)), "a metric is listed twice"
    return set(found)


def test_the_tables_name_every_logged_metric_and_no_other(model_path):
    logged = learner_names(model_path) | runner_names() | driver_names()
    tables = documented("algorithm.md") | documented("methods.md")
    assert not logged - tables, f"logged, but in no table: {sorted(logged - tables)}"
    assert not tables - logged, f"in a table, but not logged: {sorted(tables - logged)}"


def test_names_by_which_sweeps_tell_a_misspelling_are_those_of_the_tables():
    tables = documented("algorithm.md")
    known = set(KNOWN) - set(PROGRESS)
    assert not known - tables, f"in no table: {sorted(known - tables)}"
    for prefix in ("env_runners/", "evaluation/"):
        missing = {name for name in tables if name.startswith(prefix)} - known
        assert not missing, f"unknown to sweeps: {sorted(missing)}"
