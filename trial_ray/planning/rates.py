"""What a simulation is given: lengths of rollouts, speeds of the parts, and how many of each there are."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from trial_ray.config.sampling import fewest_and_most
from trial_ray.planning.request import PlanRequest
from trial_ray.planning.step_time import PROMPT_SHARE, RESPONSE_SHARE, TURNS_SHARE

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

FURTHER_CORE = 0.65
"""What a busy core adds to the first, whose caches and memory it shares. An assumption: a learner on two cores of a virtual machine
was 1.63 times as fast as on one."""
DEVIATION = 0.02
"""Of the speeds of GPUs of one type, relative. An assumption."""


class TurnTokens(NamedTuple):
    """Tokens of a turn: of the prompt, and of the response, at least 1."""

    prompt: int
    response: int


Rollout = Sequence[TurnTokens]


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of rollouts.

    Attributes:
        groups: of rollouts of one task each.
    """

    groups: Sequence[Sequence[Rollout]]

    @property
    def num_turns(self) -> float:
        """Mean turns of a rollout."""
        lengths = [len(rollout) for group in self.groups for rollout in group]
        return sum(lengths) / len(lengths)

    @property
    def tokens(self) -> TurnTokens:
        """Mean tokens of a turn, rounded up."""
        turns = [turn for group in self.groups for rollout in group for turn in rollout]
        prompt, response = (sum(turn[part] for turn in turns) / len(turns) for part in (0, 1))
        return TurnTokens(math.ceil(prompt), math.ceil(response))

    @classmethod
    def assumed(cls, request: PlanRequest, seed: int, num_groups: int = 64, group_size: int = 8) -> Workload:
        """The planner's mean lengths, spread: turns evenly up to the limit, responses exponentially, prompts not at all."""
        random = Random(seed)
        most, prompt = request.max_turns, max(1, round(PROMPT_SHARE * request.max_prompt_tokens))
        least = max(1, round((2 * TURNS_SHARE - 1) * most))

        def rollout() -> list[TurnTokens]:
            lengths = (
                random.expovariate(1 / (RESPONSE_SHARE * request.max_response_tokens))
                for _ in range(random.randint(least, most))
            )
            return [TurnTokens(prompt, min(request.max_response_tokens, 1 + math.floor(length))) for length in lengths]

        return cls([[rollout() for _ in range(group_size)] for _ in range(num_groups)])


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Speed of an engine.

    Attributes:
        decode: requests under way, ascending, and seconds of a decoding step of so many; between two of them, and beyond the
            last, on the line through both.
        prompt_token_s: seconds of a prompt token that the prefix cache does not have.
        cached_share: share of prompt tokens that it has.
        most_rows: most requests that are decoded at a time.
        joins_late: requests wait until they are many or have waited for some steps (the transformers engine).
    """

    decode: Sequence[tuple[float, float]]
    prompt_token_s: float
    cached_share: float
    most_rows: int
    joins_late: bool = False

    def step_s(self, rows: float) -> float:
        """Seconds of a decoding step of so many requests."""
        points = self.decode
        if len(points) == 1:
            return points[0][1]
        index = min(max(1, bisect_left(points, (rows,))), len(points) - 1)
        (low, fast), (high, slow) = points[index - 1 : index + 1]
        return max(fast + (slow - fast) * (rows - low) / (high - low), 0.0)

    def prefill_s(self, tokens: float) -> float:
        """Seconds that prompts of so many tokens add to a step."""
        return tokens * (1 - self.cached_share) * self.prompt_token_s

    def tokens_per_second(self, rows: int) -> float:
        """Response tokens a second with so many requests under way."""
        return rows / self.step_s(rows)

    def times(self, factor: float) -> EngineRates:
        """The rates of an engine whose steps take so many times as long."""
        decode = [(rows, seconds * factor) for rows, seconds in self.decode]
        return EngineRates(decode, self.prompt_token_s * factor, self.cached_share, self.most_rows, self.joins_late)


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of all parts, in seconds.

    Attributes:
        engine: of each engine.
        turn_s: of an env runner's thread for a turn: environment, prompt, messages; one turn after the other.
        scoring_token_s, update_token_s: of one learner for a token of a row, before and in the optimizer steps; where actors share
            cores, of one thread.
        step_s: of an optimizer step beside its passes: exchange of gradients, optimizer.
        update_s: of an update beside scoring and steps.
        sync_s: of weights into all engines.
        other_s: of an iteration beside its phases.
        environment_s: of a turn in which its environment answers elsewhere, many turns at a time.
    """

    engine: EngineRates
    turn_s: float
    scoring_token_s: float
    update_token_s: float
    step_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0
    other_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Actors and work of an iteration; attributes with the name of a setting have its value.

    Attributes:
        learners: at least 1.
        colocate: engines and learners take turns on the same devices.
        cores: that all actors share, in units of one that works alone; infinite: each has its own.
        learner_threads: of each learner on the cores.
        learner_in_driver: the learner is in the driver's process, to which the system gives cores before Ray's actors.
        deviation: standard deviation of actors' speeds, relative; the slow ones are stragglers.
    """

    tasks: int
    group_size: int
    max_staleness: int
    engines: int
    env_runners: int
    episodes_in_flight: int
    learners: int
    minibatch_rows: int
    num_epochs: int = 1
    colocate: bool = False
    cores: float = math.inf
    learner_threads: int = 1
    learner_in_driver: bool = False
    deviation: float = 0.0

    @classmethod
    def of(cls, settings: RunSettings, cores: int) -> Arrangement:
        """The actors that settings ask for.

        Args:
            settings: of a run.
            cores: of the host; they are shared where the run uses no GPUs.
        """
        shared = not (settings.num_gpus_per_engine or settings.num_gpus_per_learner)
        local = settings.num_learners == 0
        reserved = 1 if settings.num_cpus_per_learner == "auto" else max(1, int(settings.num_cpus_per_learner))
        return cls(
            tasks=settings.tasks_per_iteration,
            group_size=settings.group_size,
            max_staleness=settings.max_staleness,
            engines=fewest_and_most(settings.num_engines)[1],
            env_runners=max(1, fewest_and_most(settings.num_env_runners)[1]),
            episodes_in_flight=settings.max_episodes_in_flight,
            learners=max(1, settings.num_learners),
            minibatch_rows=settings.minibatch_rows,
            num_epochs=settings.num_epochs,
            colocate=settings.colocate,
            cores=1 + FURTHER_CORE * (cores - 1) if shared else math.inf,
            # In the main process torch takes all cores, in an actor as many as Ray reserves for it.
            learner_threads=1 if not shared else cores if local else min(cores, reserved),
            learner_in_driver=shared and local,
            deviation=0.0 if shared else DEVIATION,
        )


def update_seconds(arrangement: Arrangement, rates: Rates, rows: int, tokens: int) -> tuple[float, float]:
    """Seconds of scoring and of the optimizer steps of an update, of one thread; the learner with the most rows is waited for.

    Args:
        arrangement: its learners and minibatches.
        rates: of learners.
        rows: turns.
        tokens: of their prompts and responses.
    """
    if not rows:
        return 0.0, 0.0
    row_tokens, learners = tokens / rows, arrangement.learners
    whole, last = divmod(rows, arrangement.minibatch_rows)
    longest = whole * math.ceil(arrangement.minibatch_rows / learners) + math.ceil(last / learners)
    scoring = math.ceil(rows / learners) * row_tokens * rates.scoring_token_s
    steps = longest * row_tokens * rates.update_token_s + (whole + bool(last)) * rates.step_s
    return scoring, arrangement.num_epochs * steps + rates.update_s
