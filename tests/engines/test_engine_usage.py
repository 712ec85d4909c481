"""What an engine says of its steps, which the simulation of runs takes its speed from."""

from __future__ import annotations

import numpy as np

from trial_ray.engines.admission import EngineUsage, Request, StepTotals
from trial_ray.engines.protocol import SamplingParams


def test_steps_are_summed_by_the_power_of_two_of_the_requests_under_way():
    usage, requests = EngineUsage(), [Request(np.arange(1, 1 + length), SamplingParams(4)) for length in (5, 7)]
    usage.add(2, requests, [], 0.5)
    usage.add(3, [], requests[:1], 0.25)
    usage.add(1, [], requests[1:], 0.125)
    assert usage.steps == {
        2: StepTotals(steps=2, rows=5, prompt_tokens=12, seconds=0.75),
        1: StepTotals(steps=1, rows=1, prompt_tokens=0, seconds=0.125),
    }
    assert usage.busy_seconds == 0.875
    assert usage.prompt_tokens == 12
