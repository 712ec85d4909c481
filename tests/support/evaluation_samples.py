"""Synthetic evaluations for the tests of tables, comparisons and partial results."""

import hashlib

import numpy as np

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.trajectory import EpisodeResult

FAMILIES = tuple(ADAPTER.labels.family_titles)


def evaluation(
    successes, *, env=ADAPTER.env_id, split="valid_seen", families=FAMILIES, scores=None, failed=0, **protocol
):
    """Return an evaluation with one episode for each entry of ``successes``; families alternate.

    The last ``failed`` episodes were ended by an error.
    """
    tasks = [f"{split}/{index}" for index in range(len(successes))]
    scores = successes if scores is None else scores
    episodes = [
        EpisodeResult(
            task,
            families[index % len(families)],
            bool(won),
            float(score),
            5,
            "failed" if index + failed >= len(tasks) else "terminated",
        )
        for index, (task, won, score) in enumerate(zip(tasks, successes, scores, strict=True))
    ]
    protocol = {
        "env": env,
        "split": split,
        "num_tasks": len(tasks),
        "panel_sha256": hashlib.sha256("\n".join(tasks).encode()).hexdigest(),
        "temperature": 0.4,
        **protocol,
    }
    return EvaluationResult(protocol, episodes, "p")


def coin_flips(count, rate, seed):
    """Return random successes, bool ``[count]``."""
    return np.random.default_rng(seed).random(count) < rate
