"""Learners agree on which groups are lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import ray
from ray.exceptions import ObjectLostError

from trial_ray.learner.exchange import fetch_groups

WAIT_S = 30.0


class Gathering:
    """The exchange of learners that are threads."""

    def __init__(self, num_learners: int) -> None:
        self.values, self._barrier = [None] * num_learners, threading.Barrier(num_learners, timeout=WAIT_S)

    def gather(self, rank: int, value):
        self.values[rank] = value
        self._barrier.wait()
        return list(self.values)


class OneOf:
    def __init__(self, gathering: Gathering, rank: int) -> None:
        self.gather = lambda value: gathering.gather(rank, value)


def test_a_group_that_one_learner_misses_is_left_out_by_all(monkeypatch):
    lost, rank = {0: {"3"}, 1: {"0", "3"}, 2: set()}, threading.local()

    def get(refs, timeout):
        if missing := lost[rank.number].intersection(refs):
            raise ObjectLostError(str(missing), None, "")
        return [f"group {ref}" for ref in refs]

    monkeypatch.setattr(ray, "get", get)
    gathering = Gathering(len(lost))

    def fetch(number: int):
        rank.number = number
        return fetch_groups([str(ref) for ref in range(5)], OneOf(gathering, number))

    with ThreadPoolExecutor(len(lost)) as threads:
        assert list(threads.map(fetch, lost)) == [["group 1", "group 2", "group 4"]] * 3
