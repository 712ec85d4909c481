"""Environments that draw from the global generators do not influence each other or the process."""

import random
from collections import defaultdict

import numpy as np

from trial_envs.imports.random_state import RandomState


def drawn():
    return random.random(), np.random.rand()


def test_alternating_states_continue_where_they_were():
    states = {seed: RandomState() for seed in (3, 2**32 - 1)}
    random.seed(11), np.random.seed(11)
    seen = defaultdict(list)
    for turn in range(4):
        for seed, state in states.items():
            with state.active(None if turn else seed):
                seen[seed].append(drawn())
            seen[11].append(drawn())
    for seed, values in seen.items():
        random.seed(seed), np.random.seed(seed)
        assert values == [drawn() for _ in values]
