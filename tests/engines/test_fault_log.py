"""The line on actors that were replaced."""

from __future__ import annotations

from trial_ray.engines.pool import FaultLog


def test_a_line_names_what_was_lost_and_what_that_cost_once():
    log = FaultLog()
    log.played_again += 4
    assert log.take() == ""  # rollouts that failed by themselves
    log.note("engine 0 died before it could load weights: The actor died.\nmore")
    with log.waiting():
        pass
    log.played_again += 2
    log.seconds += 2.5
    line = log.take()
    assert (
        line == "replaced: engine 0 died before it could load weights: The actor died (played again: 2, waited 2.5 s)"
    )
    assert log.take() == ""
    for number in range(5):
        log.note(f"engine {number}")
    assert "engine 2; and 2 more (played again: 0, waited 0.0 s)" in log.take()
