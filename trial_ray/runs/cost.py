"""Cost of a run: seconds by phase, tokens, FLOPs and memory, in ``cost.json`` and in a table at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trial_ray.errors import CheckpointError, LearnerError, first_line
from trial_ray.files import Json, Numbers, Record, checked_content, read_json, set_aside, write_json
from trial_ray.metrics import LEARNER

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.algorithms.grpo import GRPO

logger = logging.getLogger(__name__)
Measured = TypeVar("Measured")
SCHEMA = "trial_ray/cost"
SCHEMA_VERSION = 1
PHASES = {
    "start": "start of Ray, actors, engines and models",
    "sampling": "sampling",
    "scoring": "scoring (passes without gradients)",
    "update": "update (optimizer steps)",
    "sync": "weight sync",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "other": "other, idle",
}
"""Titles of a run's phases; every second of the run is counted in exactly one phase."""
METRICS = {
    "prompt_tokens_sampled": "env_runners/num_prompt_tokens",
    "response_tokens_sampled": "env_runners/num_response_tokens",
    "tokens_trained": f"{LEARNER}update/tokens_trained",
    **{
        f"{phase}_{name}": f"{LEARNER}{phase}/{name}"
        for phase in ("scoring", "update")
        for name in ("seconds", "tokens_forwarded", "tokens_distinct")
    },
}
"""Keys of the metrics that are summed over the iterations, by the name of the sum."""
SCORING_FLOPS = 2
"""Floating-point operations of a forward pass, per token and parameter that the token is multiplied by."""


def learner_hardware(algorithm: GRPO) -> Json:
    """Measure the device of a run's learners, which must be idle; their utilisation is computed from the result.

    Returns:
        ``num_learners``, the learners that compute at the same time; ``matmul_flops``, the measured operations per second of a
        large matrix product on one learner's device; ``matmul_parameters``, the parameters that every token is multiplied by;
        and ``update_flops``, the operations of forward and backward pass, per token and parameter.

    Raises:
        LearnerError: a learner did not answer, or the measured rate is not finite.
        UserInputError: the shape of the model is unknown.
    """
    from trial_ray.models.model_shape import model_shape

    config, rate = algorithm.config, algorithm.matmul_rate()
    if not math.isfinite(rate):
        raise LearnerError(f"A matrix product on a learner's device took too little time to be measured ({rate}).")
    return {
        "num_learners": max(1, config.num_learners),
        "matmul_flops": rate,
        "matmul_parameters": model_shape(str(config.model_path)).matmul_parameters,
        # With LoRA, the weights are frozen, and only adapters have gradients.
        "update_flops": 4 if getattr(config, "lora_rank", None) else 6,
    }


def measure_or_warn(name: str, measure: Callable[[], Measured]) -> Measured | None:
    """Return the result of ``measure``; if it raises, log a warning and return ``None``: a measurement must not end a run.

    Args:
        name: name of the measurement, for the warning.
        measure: function without arguments; may raise any exception.
    """
    try:
        return measure()
    except Exception as error:
        logger.warning("%s: not measured (%s: %s)", name, type(error).__name__, first_line(error))
        return None


class CostMeter:
    """Adds up the cost of a run during one command; costs of earlier commands of a resumed run stay in ``cost.json``.

    If ``cost.json`` exists but cannot be read, it is renamed, and a warning is logged.

    Args:
        file: ``cost.json``.

    Attributes:
        began: whether the actors have started; the file is not written before.
        actors: reports of the actors at the end of the run, by name (``GRPO.actor_reports``).
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._start = time.monotonic()
        try:
            self._earlier = read_parts(file)
        except CheckpointError as error:
            aside = set_aside(file, "unreadable")
            logger.warning("%s It was set aside as %s; costs are counted from now on.", error, aside.name)
            self._earlier = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(int)
        self._hardware: Json | None = None
        self._iterations = 0
        self.began = False
        self.actors: dict[str, Json | None] = {}

    def started(self, hardware: Json | None) -> None:
        """Count the time up to now as the phase ``start``.

        Args:
            hardware: result of :func:`learner_hardware`; ``None`` if it could not be measured; utilisation is then unknown.
        """
        self._seconds["start"] = time.monotonic() - self._start
        self._hardware = hardware
        self.began = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context as phase ``name``; at its end, write the file if the actors have started."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - began
            if self.began:
                self.write()

    def iteration(self, metrics: Numbers) -> None:
        """Add an iteration's flat metrics, and write the file, so that it exists even if the run is killed later."""
        self._iterations += 1
        scoring = metrics.get(METRICS["scoring_seconds"], 0.0)
        self._seconds["scoring"] += scoring
        # "seconds/update" is the time of the learners' whole call: subtract the phase "scoring", which it includes.
        self._seconds["update"] += max(0.0, metrics.get("seconds/update", 0.0) - scoring)
        for phase in ("sampling", "sync", "evaluation"):
            self._seconds[phase] += metrics.get(f"seconds/{phase}", 0.0)
        for name, key in METRICS.items():
            if key in metrics:
                self._counts[name] += metrics[key]
        self.write()

    def write(self) -> Json:
        """Write the current ``cost.json``, and return its content."""
        wall = time.monotonic() - self._start
        part = {
            "iterations": self._iterations,
            "seconds": {**self._seconds, "other": wall - sum(self._seconds.values())},
            "wall_seconds": wall,
            "counts": self._counts,
            "learner_hardware": self._hardware,
            "actors": self.actors,
        }
        parts = [*self._earlier, part]
        card = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **total_cost(parts), "parts": parts}
        write_json(self._file, card)
        return card


def total_cost(parts: Sequence[Record]) -> Json:
    """Return the total cost of a run, given the cost of each of its commands; values that were not measured are ``None``."""
    wall = sum(part["wall_seconds"] for part in parts)
    seconds = {phase: sum(part["seconds"].get(phase, 0.0) for part in parts) for phase in PHASES}
    counts = {name: _sum(part["counts"].get(name) for part in parts) for name in METRICS}
    engines = [
        (report, part["wall_seconds"])
        for part in parts
        for report in part["actors"].values()
        if report and "busy_seconds" in report
    ]
    used = {
        name: _sum(report[name] for report, _ in engines)
        for name in ("prompt_tokens", "cached_tokens", "response_tokens", "busy_seconds")
    }
    sampled = _sum([counts["prompt_tokens_sampled"], counts["response_tokens_sampled"]])
    passes, forwarded, distinct = (
        _sum([counts[f"scoring_{name}"], counts[f"update_{name}"]])
        for name in ("seconds", "tokens_forwarded", "tokens_distinct")
    )
    return {
        "iterations": sum(part["iterations"] for part in parts),
        "wall_seconds": wall,
        "seconds": seconds,
        "shares": {phase: value / wall for phase, value in seconds.items()},
        "tokens": {
            "sampled": sampled,
            "responses_sampled": counts["response_tokens_sampled"],
            "trained": counts["tokens_trained"],
            "engine_prompts": used["prompt_tokens"],
            "engine_responses": used["response_tokens"],
        },
        "tokens_per_second": {
            "sampled": _ratio(sampled, seconds["sampling"]),
            "responses_sampled": _ratio(counts["response_tokens_sampled"], seconds["sampling"]),
            "trained": _ratio(counts["tokens_trained"], seconds["scoring"] + seconds["update"]),
            "trained_of_wall": _ratio(counts["tokens_trained"], wall),
        },
        "distinct_token_ratio": _ratio(forwarded, distinct),
        "prefix_cache_hit_share": _ratio(used["cached_tokens"], used["prompt_tokens"]),
        "model_flops_utilisation": _utilisation(parts),
        "busy_shares": {
            "learners": _ratio(passes, wall),
            "engines": _ratio(used["busy_seconds"], sum(seconds for _, seconds in engines)),
        },
        "peak_memory_bytes": _peaks(parts),
    }


def cost_sections(card: Record) -> list[list[tuple[str, str, str]]]:
    """Format the cost as three sections (time, rates, memory) of rows: label, value and share of the time."""
    rates, busy = card["tokens_per_second"], card["busy_shares"]
    measured = (
        ("tokens sampled a second of sampling", rates["sampled"], "{:,.0f}"),
        ("of them response tokens", rates["responses_sampled"], "{:,.0f}"),
        ("tokens trained a second of scoring and update", rates["trained"], "{:,.0f}"),
        ("tokens forwarded by the learner / distinct ones", card["distinct_token_ratio"], "{:.2f}"),
        ("prompt tokens from the engines' prefix cache", card["prefix_cache_hit_share"], "{:.1%}"),
        ("model FLOPs utilisation of the learner's passes", card["model_flops_utilisation"], "{:.1%}"),
        ("learners computing, of the whole time", busy["learners"], "{:.1%}"),
        ("engines computing, of the whole time", busy["engines"], "{:.1%}"),
    )
    return [
        [(label, f"{card['seconds'][phase]:.1f} s", f"{card['shares'][phase]:.1%}") for phase, label in PHASES.items()],
        [(label, "not measured" if value is None else form.format(value), "") for label, value, form in measured],
        [(f"peak memory, {actor}", _memory(peak), "") for actor, peak in card["peak_memory_bytes"].items()],
    ]


def cost_table(card: Record) -> Table:
    """Format the cost as a table for the terminal."""
    from rich.table import Table

    number = card["iterations"]
    title = f"cost of {number} iteration{'s' if number != 1 else ''}, {card['wall_seconds']:.1f} s"
    if len(card["parts"]) > 1:
        title += f" in {len(card['parts'])} parts"
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("figure", justify="right")
    table.add_column("share", justify="right")
    for section in cost_sections(card):
        for row in section:
            table.add_row(*row)
        table.add_section()
    return table


def _memory(peak: Mapping[str, int | None]) -> str:
    host, device = peak["host"], peak["device"]
    text = "not measured" if host is None else f"{host / 2**30:.2f} GiB"
    return text if device is None else f"{text}, GPU {device / 2**30:.2f} GiB"


def _utilisation(parts: Sequence[Record]) -> float | None:
    """Return the FLOP/s of the learners' passes, not counting attention, as a share of the FLOP/s of a large matrix product.

    The result is ``None`` if nothing was measured.
    """
    done = possible = 0.0
    for part in parts:
        counts, hardware = part["counts"], part["learner_hardware"]
        if hardware is None or "update_tokens_forwarded" not in counts:
            continue
        tokens = hardware["update_flops"] * counts["update_tokens_forwarded"]
        tokens += SCORING_FLOPS * counts.get("scoring_tokens_forwarded", 0)
        done += hardware["matmul_parameters"] * tokens
        seconds = counts.get("scoring_seconds", 0) + counts.get("update_seconds", 0)
        possible += hardware["matmul_flops"] * hardware["num_learners"] * seconds
    return float(done / possible) if possible else None


def _peaks(parts: Sequence[Record]) -> dict[str, dict[str, int | None]]:
    peaks: dict[str, dict[str, int | None]] = {}
    for part in parts:
        for name, report in part["actors"].items():
            peak = peaks.setdefault(name, {"host": None, "device": None})
            for where, before in peak.items():
                measured = (report or {}).get(f"{where}_bytes")
                if measured is not None:
                    peak[where] = max(before or 0, measured)
    return peaks


def _sum(values: Any) -> Any:
    """Return the sum of the measured values; ``None`` if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def read_parts(file: Path) -> list[Json]:
    """Read the cost of each command of a run from the run's ``cost.json``; empty if the file is missing.

    Raises:
        CheckpointError: the file does not have this version's format.
    """
    if not file.exists():
        return []
    card = read_json(file, SCHEMA, SCHEMA_VERSION)
    with checked_content(file):
        parts: list[Json] = card["parts"]
        json.dumps(total := total_cost(parts), allow_nan=False)
        cost_sections(total)
    return parts
