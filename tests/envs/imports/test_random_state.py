"""Environments that draw from the global generators do not influence each other or the process."""

import random
import threading

import numpy as np

from trial_envs.imports.random_state import RandomState


def drawn() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def expected(seed: int, number: int) -> list[tuple[float, float]]:
    generators = random.Random(seed), np.random.RandomState(seed)
    return [(generators[0].random(), float(generators[1].rand())) for _ in range(number)]


def test_alternating_states_continue_where_they_were():
    states, seeds = [RandomState(), RandomState()], [3, 2**32 - 1]
    random.seed(11), np.random.seed(11)
    seen: list[list[tuple[float, float]]] = [[], []]
    outside = []
    for turn in range(4):
        for index, state in enumerate(states):
            with state.active(None if turn else seeds[index]):
                seen[index].append(drawn())
            outside.append(drawn())
    assert seen == [expected(seed, 4) for seed in seeds]
    assert outside == expected(11, 8)


def test_threads_take_turns():
    states, seen = [RandomState() for _ in range(4)], [[] for _ in range(4)]

    def play(index: int) -> None:
        for turn in range(50):
            with states[index].active(None if turn else index):
                seen[index].append(drawn())

    threads = [threading.Thread(target=play, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert seen == [expected(index, 50) for index in range(4)]
