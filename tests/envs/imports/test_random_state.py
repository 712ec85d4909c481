"""Environments that draw from the global generators do not influence each other or the process."""

import random

import numpy as np

from trial_envs.imports.random_state import RandomState


def drawn() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def expected(seed: int, number: int) -> list[tuple[float, float]]:
    generators = random.Random(seed), np.random.RandomState(seed)
    return [(generators[0].random(), float(generators[1].rand())) for _ in range(number)]


def test_alternating_states_continue_where_they_were():
    states = {seed: RandomState() for seed in (3, 2**32 - 1)}
    random.seed(11), np.random.seed(11)
    seen: dict[int, list[tuple[float, float]]] = {3: [], 2**32 - 1: [], 11: []}
    for turn in range(4):
        for seed, state in states.items():
            with state.active(None if turn else seed):
                seen[seed].append(drawn())
            seen[11].append(drawn())
    assert seen == {seed: expected(seed, len(values)) for seed, values in seen.items()}
