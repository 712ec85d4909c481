"""Speeds of a run's parts out of what it recorded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from trial_ray.errors import UserInputError
from trial_ray.metrics import LEARNER
from trial_ray.planning.rates import Arrangement, EngineRates, Rates, Workload
from trial_ray.planning.simulation import simulate

BISECTIONS = 12
TOKENS = f"{LEARNER}update/tokens_trained"


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """Steps of engines that began with about so many requests.

    Attributes:
        steps: their number.
        rows: requests under way, summed over the steps.
        prompt_tokens: of requests that came in, summed.
        seconds: of all.
    """

    steps: int
    rows: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run's folder says of its speed.

    Attributes:
        workload: lengths of its rollouts.
        arrangement: its actors.
        iterations: metrics of each.
        steps: of its engines, by requests under way.
        most_rows: most requests that an engine decodes at a time.
        joins_late: of :class:`~trial_ray.planning.rates.EngineRates`.
        cached_share: of prompt tokens.
    """

    workload: Workload
    arrangement: Arrangement
    iterations: Sequence[Mapping[str, float]]
    steps: Sequence[EngineSteps]
    most_rows: int
    joins_late: bool
    cached_share: float


def fit_rates(run: RecordedRun, seed: int = 0) -> Rates:
    """Speeds with which the simulation of the run takes as long as the run did.

    Steps of engines and phases of learners are measured. An env runner's time for a turn is not: it is chosen so that sampling
    takes as long as it did. The first iteration, in which much starts, counts only where there is no other. Each speed
    is the median over iterations, so that one which other programs slowed counts no more than others.

    Raises:
        UserInputError: the run does not say enough.
    """
    if run.arrangement.max_staleness:
        raise UserInputError(
            f"The recorded run has max_staleness={run.arrangement.max_staleness}: its engines and learners slowed each other, so "
            "that its times are not those of either. Name a run with max_staleness=0."
        )
    trained = [each for each in run.iterations if each.get(TOKENS, 0.0) > 0]
    counted = trained[1:] or trained
    if not counted:
        raise UserInputError(
            "metrics.jsonl of the recorded run has no iteration that trained something; name another run."
        )
    sampling = median(each["seconds/sampling"] for each in counted)
    rates = Rates(engine=fit_engine(run), turn_s=0.0, **_learner_rates(counted, run.arrangement))
    low, high = 0.0, sampling
    if _sampling(run, rates, seed) >= sampling:
        return rates
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _sampling(run, replace(rates, turn_s=middle), seed)
        low, high = (middle, high) if found < sampling else (low, middle)
        if high - low < 1e-3 * high:
            break
    return replace(rates, turn_s=(low + high) / 2)


def fit_engine(run: RecordedRun) -> EngineRates:
    """Least squares of the seconds of steps: so much a step, a request under way, and a prompt token, none below 0.

    Raises:
        UserInputError: too few steps were recorded.
    """
    table = [each for each in run.steps if each.steps and each.seconds > 0]
    if len(table) < 2:
        raise UserInputError(
            f"cost.json of the recorded run has steps of its engines with {len(table)} numbers of requests under way, at "
            "least 2 are needed for their speed. Record a run of this version that ends by itself, with a group_size above 1."
        )
    columns = np.array([(each.steps, each.rows, each.prompt_tokens) for each in table], float)
    seconds = np.array([each.seconds for each in table])
    # Steps take the longer the more there are of them: errors are weighed as those of counts are.
    weight = 1 / np.sqrt(seconds)
    best, least = np.zeros(3), np.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
        chosen = list(kept)
        found, *_ = np.linalg.lstsq(columns[:, chosen] * weight[:, None], seconds * weight, rcond=None)
        error = float(np.sum(((columns[:, chosen] @ found - seconds) * weight) ** 2))
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[chosen] = found
    step, row, token = map(float, best)
    decode = [(1.0, step + row), (max(2.0, run.most_rows), step + row * max(2.0, run.most_rows))]
    return EngineRates(decode, token / (1 - run.cached_share), run.cached_share, run.most_rows, run.joins_late)


def _learner_rates(counted: Sequence[Mapping[str, float]], arrangement: Arrangement) -> dict[str, float]:
    at_work = min(arrangement.learners * arrangement.learner_threads, arrangement.cores)
    phases = [f"seconds/{phase}" for phase in ("sampling", "update", "sync", "evaluation")]
    passes = [(each[f"{LEARNER}scoring/seconds"], each[f"{LEARNER}update/seconds"], each[TOKENS]) for each in counted]
    rest = [each["seconds/update"] - scoring - steps for each, (scoring, steps, _) in zip(counted, passes, strict=True)]
    other = [each["time_this_iter_s"] - sum(each.get(phase, 0.0) for phase in phases) for each in counted]
    return {
        "scoring_token_s": median(scoring / tokens for scoring, _, tokens in passes) * at_work * arrangement.num_epochs,
        "update_token_s": median(steps / tokens for _, steps, tokens in passes) * at_work,
        "update_s": max(0.0, median(rest)) * at_work / arrangement.learners,
        "sync_s": median(each.get("seconds/sync", 0.0) for each in counted),
        "other_s": max(0.0, median(other)),
    }


def _sampling(run: RecordedRun, rates: Rates, seed: int) -> float:
    """Simulated seconds of sampling an iteration; every recorded group is played about once."""
    number = max(1, len(run.workload.groups) // run.arrangement.tasks)
    found = simulate(run.workload, run.arrangement, rates, number, seed).iterations
    return sum(each.sampling for each in found) / len(found)
