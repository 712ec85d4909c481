"""A learner fetches the rollouts of its share and has headers of the others; all learners agree on which groups are lost."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectLostError
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.methods import config_class, method_names
from trial_ray.learner.connectors import group_turn_rows, plan_rows
from trial_ray.learner.exchange import GroupFetcher, TrainingGroups
from trial_ray.learner.method import Method
from trial_ray.learner.rows import anchor_ids, step_values
from trial_ray.rollout.groups import GroupRefs, parts_per_group
from trial_ray.rollout.trajectory import Turn, TurnHeader

WAIT_S = 30.0
REFERENCE_BYTES = 160
"""Of a reference that Ray packs."""


class Store:
    """An object store; each thread is a process of its own, and notes what it gets.

    Attributes:
        lost: objects by the rank of a learner that cannot get them.
        received: bytes by rank.
    """

    def __init__(self, monkeypatch) -> None:
        self._values, self._numbers = {}, itertools.count()
        self.lost, self.received = defaultdict(set), defaultdict(int)
        self.rank = threading.local()
        monkeypatch.setattr(ray, "put", self.put)
        monkeypatch.setattr(ray, "get", self.get)

    def put(self, value) -> str:
        ref = str(next(self._numbers)).zfill(REFERENCE_BYTES)
        self._values[ref] = pickle.dumps(value)
        return ref

    def get(self, refs, timeout):
        rank = self.rank.number
        if lost := self.lost[rank].intersection(refs):
            raise ObjectLostError(str(lost), None, "")
        self.received[rank] += sum(len(self._values[ref]) for ref in refs)
        return [pickle.loads(self._values[ref]) for ref in refs]

    def parts(self, refs: GroupRefs) -> list[str]:
        return pickle.loads(self._values[refs.parts])

    def size(self, refs) -> int:
        return sum(len(self._values[ref]) for ref in refs)


class Gathering:
    """The exchange of learners that are threads."""

    def __init__(self, num_learners: int) -> None:
        self._values, self._barrier = [None] * num_learners, threading.Barrier(num_learners, timeout=WAIT_S)

    def of(self, rank: int):
        return OneOf(self, rank)

    def gather(self, rank: int, value):
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class OneOf:
    def __init__(self, gathering: Gathering, rank: int) -> None:
        self._gathering, self.rank, self.num_learners = gathering, rank, len(gathering._values)
        self.swapped = 0

    def gather(self, value):
        return self._gathering.gather(self.rank, value)

    def swap(self, values, senders):
        everything = self.gather(values)
        taken = [everything[sender][self.rank] for sender in senders]
        self.swapped += sum(map(len, taken))
        return taken


@pytest.fixture
def store(monkeypatch) -> Store:
    return Store(monkeypatch)


def config_of(num_learners: int, tasks: int = 16, **training) -> GRPOConfig:
    config = GRPOConfig().environment("trial/ALFWorld-v0").learners(num_learners=num_learners)
    return config.training(tasks_per_iteration=tasks, group_size=8, **training)


def groups_of(tasks: int = 16, **lengths):
    """Groups whose prompts are long beside what a header holds."""

    def long(turn: Turn) -> Turn:
        return replace(turn, prompt_ids=np.resize(turn.prompt_ids, 40 * len(turn.prompt_ids)))

    groups = synthetic_groups(400, num_groups=tasks, group_size=8, most_turns=12, **lengths)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        trajectory.turns = [long(turn) for turn in trajectory.turns]
    return groups


def fetched(store: Store, config: GRPOConfig, groups, *, whole: bool = False, lose=lambda refs: {}):
    """What each learner has, and the references; ``lose`` gives what is lost by rank."""
    refs = [GroupRefs.put(group, parts_per_group(config)) for group in groups]
    store.lost.update(lose(refs))
    gathering = Gathering(config.num_learners)

    def fetch(rank: int):
        store.rank.number, exchange = rank, gathering.of(rank)
        data = TrainingGroups(episodes_refs=refs)
        found = GroupFetcher(data, exchange, lambda headers: plan_rows(headers, config, 1), whole=whole).fetch()
        store.received[rank] += exchange.swapped + len(pickle.dumps(refs))
        return found

    with ThreadPoolExecutor(config.num_learners) as threads:
        return list(threads.map(fetch, range(config.num_learners))), refs


def turns_of(groups) -> list:
    return [turn for group in groups for trajectory in group.survivors for turn in trajectory.turns]


@pytest.mark.parametrize(("num_learners", "tasks"), [(2, 16), (8, 16), (3, 64)])
def test_a_learner_receives_little_more_than_its_share_of_the_rows(store, num_learners, tasks):
    """Headers, references and turns of other learners included."""
    config, groups = config_of(num_learners, tasks), groups_of(tasks)
    learners, refs = fetched(store, config, groups)
    batch = store.size([part for each in refs for part in store.parts(each)])
    rows = [turns_of(found) for found, _ in learners]
    for rank, (_, plan) in enumerate(learners):
        share = set(plan.share(rank).tolist())
        assert all(isinstance(turn, Turn) for row, turn in enumerate(rows[rank]) if row in share)
    assert max(store.received.values()) < 1.2 * batch / num_learners


def test_learners_make_one_plan_and_know_of_each_turn_what_its_header_says(store):
    config, groups = config_of(4), groups_of()
    groups[3].trajectories[2] = replace(groups[3].trajectories[2], ended="failed", error="gone", failed_by="engine")
    groups[5].trajectories[0] = replace(groups[5].trajectories[0], turns=[])
    learners, _ = fetched(store, config, groups)
    expected = plan_rows(groups, config, 1)
    whole = group_turn_rows(groups, config)
    for found, plan in learners:
        assert all(map(np.array_equal, plan.scoring, expected.scoring))
        assert [group.group_id for group in found] == [group.group_id for group in groups]
        rows = group_turn_rows(found, config)
        assert rows.lengths.equal(whole.lengths)
        assert rows.advantages.equal(whole.advantages)
        assert anchor_ids(found).equal(anchor_ids(groups))
        assert step_values(found).equal(step_values(groups))
        assert [turn.header if isinstance(turn, Turn) else turn for turn in turns_of(found)] == [
            turn.header for turn in turns_of(groups)
        ]
        assert any(isinstance(turn, TurnHeader) for turn in turns_of(found))


def test_only_methods_with_a_prepare_of_their_own_are_taken_to_read_texts():
    class Plain(Method):
        name = "plain"

    class Reads(Plain):
        def prepare(self, rows, groups, iteration):
            return {}

    class Counts(Plain):
        needs_whole_groups = False

        def prepare(self, rows, groups, iteration):
            return {}

    assert [each.needs_whole_groups for each in (Plain, Reads, Counts)] == [False, True, False]
    assert not any(config_class(name).method_class.needs_whole_groups for name in method_names())


@pytest.mark.parametrize("what", ["references", "part"])
def test_a_group_of_which_one_learner_misses_something_is_left_out_by_all(store, what):
    config, groups = config_of(3), groups_of()

    def lose(refs):
        return {1: {refs[6].parts} if what == "references" else {*store.parts(refs[6]), store.parts(refs[9])[0]}}

    learners, _ = fetched(store, config, groups, lose=lose)
    left_out = {6} if what == "references" else {6, 9}
    first_found, first_plan = learners[0]
    found_ids = {group.group_id for group in first_found}
    assert {group.group_id for group in groups} - found_ids <= {groups[number].group_id for number in left_out}
    kept = [group for group in groups if group.group_id in found_ids]
    # A lost part that no learner needs of this rank is no loss; the one in the middle of its share is.
    assert len(kept) < len(groups)
    expected = plan_rows(kept, config, 1)
    for rank, (found, plan) in enumerate(learners):
        assert [group.group_id for group in found] == [group.group_id for group in kept]
        assert all(map(np.array_equal, plan.scoring, expected.scoring))
        turns = turns_of(found)
        assert all(isinstance(turns[row], Turn) for row in plan.share(rank))
    assert len(first_plan.steps) == len(expected.steps)
