"""A run on other numbers of GPUs: who gets them, what the parts then take, and which part is the limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trial_ray.errors import ConfigError
from trial_ray.planning.learner import trained_parameters
from trial_ray.planning.rates import Arrangement, EngineRates, Rates, Workload, update_seconds
from trial_ray.planning.reliability import Faults, LongRun, best_interval
from trial_ray.planning.request import PlanRequest
from trial_ray.planning.simulation import Loss, LossKind, SimulatedRun, simulate
from trial_ray.planning.step_time import (
    CACHED_SHARE,
    ENVIRONMENT_STEP_S,
    SYNC_BYTES_PER_S,
    Device,
    decoding_step,
    optimizer_step,
    prefill_token,
    scoring_token,
    update_token,
)

GPUS_PER_NODE = 8
NETWORK_BYTES_PER_S = 50e9
"""Of a GPU to GPUs of other nodes (400 Gbit/s); an assumption."""
NODE_BYTES_PER_S = 2.5e9
"""Of weights from one node's object store to another's. An assumption."""
RUNNER_TURN_S = 0.0025
"""An env runner's time for a turn of an official game (``benchmarks/results/rollout.json``)."""
OVERLAPPED_SHARE = 0.5
"""Share of a step's passes during which gradients can be exchanged. An assumption."""
CHECKPOINT_BYTES_PER_S = 2e9
"""Of weights and optimizer from a learner to the host, which training waits for. An assumption."""
RESTART_S, REPLACEMENT_S = 180.0, 600.0
"""Start of all actors with their models, and time until a lost node is replaced. Assumptions."""
LOSS_MOMENTS = 4
HELPS = 0.9
"""GPUs help while twice as many bring the iteration below this share of its time."""
KINDS = ("synchronous", "overlapped", "elastic")


def device_rates(request: PlanRequest, device: Device, workload: Workload) -> Rates:
    """The planner's speeds, of one learner and one node; see :func:`scaled` for more."""
    one = replace(request, num_learners=1)
    tokens, most = sum(workload.tokens), request.most_rows
    rows = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    decode = [(float(number), decoding_step(request, device, number, tokens)) for number in rows]
    late = request.engine == "transformers"
    return Rates(
        engine=EngineRates(decode, prefill_token(request, device), CACHED_SHARE, most, late),
        turn_s=RUNNER_TURN_S,
        environment_s=ENVIRONMENT_STEP_S,
        scoring_token_s=scoring_token(one, device),
        update_token_s=update_token(one, device),
        step_s=optimizer_step(request, device),
        sync_s=request.shape.parameters * request.engine_bytes / SYNC_BYTES_PER_S,
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """What stays the same on every number of GPUs.

    Attributes:
        request: sizes.
        workload: lengths of rollouts.
        arrangement: what the configuration asks for.
        rates: of one learner and one node.
        iterations: that are simulated.
        node_mtbf_s: mean seconds between two losses of a node.
        seed: of everything drawn.
    """

    request: PlanRequest
    workload: Workload
    arrangement: Arrangement
    rates: Rates
    iterations: int
    node_mtbf_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A run on so many GPUs.

    Attributes:
        gpus: that are used.
        kind: one of :data:`KINDS`.
        arrangement: actors.
        rates: of them.
        run: without losses.
        checkpoint_every: best number of iterations between checkpoints.
        losses: the long run with losses and that interval.
        faults: rates of the losses.
    """

    gpus: int
    kind: str
    arrangement: Arrangement
    rates: Rates
    run: SimulatedRun
    checkpoint_every: int
    losses: LongRun
    faults: Faults

    @property
    def iteration_s(self) -> float:
        """Mean seconds of an iteration without losses."""
        return mean_seconds(self.run)

    @property
    def gpu_hours_per_1000(self) -> float:
        """GPU hours of 1,000 trained episodes, losses included."""
        episodes = sum(each.episodes for each in self.run.iterations) / len(self.run.iterations)
        return self.gpus * self.losses.iteration_s / 3600 / episodes * 1000


def mean_seconds(run: SimulatedRun) -> float:
    """Of an iteration; the first of an overlapped run, which starts with empty engines, counts only where there is no other."""
    counted = run.iterations[1:] or run.iterations
    return sum(each.seconds for each in counted) / len(counted)


def points(scaling: Scaling, gpus: int, kinds: Sequence[str] = KINDS) -> list[Point]:
    """Simulate runs of these kinds on at most so many GPUs; a kind is missing where they are too few for engines and learners.

    Raises:
        ConfigError: the run asks for no GPUs.
    """
    if not scaling.request.gpus:
        raise ConfigError(
            "The experiment asks for no GPUs, so it cannot be simulated on a number of them. Leave --gpus and --picture out, or "
            "set num_gpus_per_engine and num_gpus_per_learner."
        )
    found = []
    for synchronous in (True, False):
        chosen = [kind for kind in kinds if (kind == "synchronous") == synchronous]
        staleness = 0 if synchronous else max(1, scaling.arrangement.max_staleness)
        arranged = _arrangements(scaling, gpus, staleness) if chosen else ()
        best = min(arranged, key=lambda each: _estimate(scaling, each), default=None)
        if best is None:
            continue
        rates = scaled(scaling, best)
        run = simulate(scaling.workload, best, rates, scaling.iterations, scaling.seed)
        for kind in chosen:
            faults = _faults(scaling, best, kind == "elastic", mean_seconds(run))
            every, losses = best_interval(faults, mean_seconds(run), scaling.seed)
            found.append(Point(_gpus(scaling, best), kind, best, rates, run, every, losses, faults))
    return found


def scaled(scaling: Scaling, arrangement: Arrangement) -> Rates:
    """Speeds with so many learners and nodes: exchanges of gradients, and weights that go from node to node."""
    request, base = scaling.request, scaling.rates
    learners, nodes = arrangement.learners, _nodes(arrangement.engines * request.tensor_parallel_size)
    # A ring: each learner sends and receives the gradients twice, less its own part.
    exchanged = 2 * trained_parameters(request) * request.model_bytes * (learners - 1) / learners / NETWORK_BYTES_PER_S
    row_tokens = sum(scaling.workload.tokens)
    passes = math.ceil(arrangement.minibatch_rows / learners) * row_tokens * base.update_token_s
    optimizer = base.step_s * request.shards / replace(request, num_learners=learners).shards
    hidden = OVERLAPPED_SHARE * passes
    step_s = optimizer + max(0.0, exchanged - hidden)
    # Each round doubles the nodes that hold the weights.
    weights = request.shape.parameters * request.engine_bytes
    sync_s = base.sync_s + math.ceil(math.log2(nodes)) * weights / NODE_BYTES_PER_S
    return replace(base, step_s=step_s, sync_s=sync_s)


def limit(scaling: Scaling, at: Point) -> str:
    """The part of a run whose doubled speed shortens the iteration most."""
    rates = at.rates
    faster = {
        "engines": replace(rates, engine=rates.engine.times(0.5)),
        "environments and env runners": replace(rates, turn_s=rates.turn_s / 2, environment_s=rates.environment_s / 2),
        "learners' passes": replace(
            rates, scoring_token_s=rates.scoring_token_s / 2, update_token_s=rates.update_token_s / 2
        ),
        "optimizer and exchange of gradients": replace(rates, step_s=rates.step_s / 2),
        "weight sync": replace(rates, sync_s=rates.sync_s / 2),
    }
    play = partial(simulate, scaling.workload, at.arrangement, iterations=scaling.iterations, seed=scaling.seed)
    return min(faster, key=lambda part: mean_seconds(play(faster[part])))


def knee(points: Sequence[Point]) -> Point | None:
    """The first of points of one kind from which twice as many GPUs do not help (:data:`HELPS`); ``None``: they always do."""
    for at in points:
        doubled = [each for each in points if each.gpus >= 2 * at.gpus]
        if doubled and doubled[0].iteration_s > HELPS * at.iteration_s:
            return at
    return None


# -- who gets the GPUs ---------------------------------------------------------------------------------------------


def _arrangements(scaling: Scaling, gpus: int, staleness: int) -> Iterator[Arrangement]:
    """Ways to divide the GPUs; env runners grow with the engines, up to one a group in flight."""
    base, split = scaling.arrangement, scaling.request.tensor_parallel_size
    groups = base.tasks * (1 + staleness)

    def arranged(engines: int, learners: int, colocate: bool) -> Arrangement:
        runners = min(groups, max(base.env_runners, math.ceil(base.env_runners * engines / base.engines)))
        return replace(
            base,
            max_staleness=staleness,
            engines=engines,
            learners=learners,
            env_runners=runners,
            colocate=colocate,
        )

    if base.colocate and not staleness:
        if gpus >= split:
            yield arranged(gpus // split, gpus, True)
        return
    for part in sorted({round(gpus * share / 16) for share in range(1, 16)} | {1}):
        if 0 < part < gpus and (engines := (gpus - part) // split):
            yield arranged(engines, part, False)


def _estimate(scaling: Scaling, arrangement: Arrangement) -> float:
    """Seconds of an iteration, roughly: engines with equal shares of the requests, all under way at once."""
    workload, rates, request = scaling.workload, scaled(scaling, arrangement), scaling.request
    prompt, response = workload.tokens
    episodes = arrangement.tasks * arrangement.group_size
    rows = episodes * workload.num_turns
    used = min(arrangement.engines, arrangement.tasks * (1 + arrangement.max_staleness))
    batch = min(request.most_rows, math.ceil(episodes * (1 + arrangement.max_staleness) / used))
    turns = rows / used
    sampling = turns * response * rates.engine.step_s(batch) / batch + turns * rates.engine.prefill_s(prompt)
    update = sum(update_seconds(arrangement, rates, math.ceil(rows), math.ceil(rows * (prompt + response))))
    return rates.sync_s + (max(sampling, update) if arrangement.max_staleness else sampling + update)


def _gpus(scaling: Scaling, arrangement: Arrangement) -> int:
    engines = arrangement.engines * scaling.request.tensor_parallel_size
    return max(engines, arrangement.learners) if arrangement.colocate else engines + arrangement.learners


def _nodes(gpus: float) -> int:
    return math.ceil(gpus / GPUS_PER_NODE)


def _faults(scaling: Scaling, arrangement: Arrangement, elastic: bool, iteration_s: float) -> Faults:
    request = replace(scaling.request, num_learners=arrangement.learners)
    engines, learners = _nodes(arrangement.engines * request.tensor_parallel_size), _nodes(arrangement.learners)
    slower = {}
    if elastic:
        fewer = {
            "slower_by_engines": replace(
                arrangement,
                engines=max(1, arrangement.engines - max(1, GPUS_PER_NODE // request.tensor_parallel_size)),
            ),
            "slower_by_learners": replace(arrangement, learners=max(1, arrangement.learners - GPUS_PER_NODE)),
        }
        for name, each in fewer.items():
            run = simulate(scaling.workload, each, scaled(scaling, each), scaling.iterations, scaling.seed)
            slower[name] = max(1.0, mean_seconds(run) / iteration_s)
    return Faults(
        node_mtbf_s=scaling.node_mtbf_s,
        learner_nodes=learners,
        engine_nodes=0 if arrangement.colocate else engines,
        # Weights and both moments of what is trained.
        checkpoint_s=3 * trained_parameters(request) * request.model_bytes / request.shards / CHECKPOINT_BYTES_PER_S,
        restart_s=RESTART_S,
        replacement_s=REPLACEMENT_S,
        elastic=elastic,
        **slower,
    )


@dataclass(frozen=True, slots=True)
class LossCost:
    """What the loss of one actor while it samples costs, on average over when it happens.

    Attributes:
        seconds: that the iterations take longer together.
        groups: that begin again.
        requests: that another engine samples again.
    """

    seconds: float
    groups: float
    requests: float


def loss_cost(scaling: Scaling, at: Point, kind: LossKind) -> LossCost:
    """Simulate the loss of an actor at several moments of the second iteration's sampling; another is there after a restart."""
    first, second = at.run.iterations[:2]
    begin = first.seconds
    seconds, groups, requests = [], [], []
    whole = sum(each.seconds for each in at.run.iterations)
    for part in range(LOSS_MOMENTS):
        moment = begin + second.sampling * (part + 0.5) / LOSS_MOMENTS
        # The engine that plays the second iteration's first group; of env runners each plays some.
        index = at.arrangement.tasks % at.arrangement.engines if kind == "engine" else 0
        loss = Loss(moment, kind, index, RESTART_S)
        run = simulate(scaling.workload, at.arrangement, at.rates, scaling.iterations, scaling.seed, [loss])
        seconds.append(sum(each.seconds for each in run.iterations) - whole)
        groups.append(run.groups_lost)
        requests.append(run.requests_repeated)
    return LossCost(*(sum(values) / LOSS_MOMENTS for values in (seconds, groups, requests)))
