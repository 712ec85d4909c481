"""Exchange between data-parallel learners: sums of tensors, small objects of each learner, and each one's share of the groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.rllib.core.learner.training_data import TrainingData
from torch import distributed, nn

from trial_ray.errors import InfrastructureError
from trial_ray.learner.update_plan import UpdatePlan
from trial_ray.rollout.groups import GroupRefs, part_bounds
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, pack, unpack

T = TypeVar("T")
Key = TypeVar("Key")
AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0

BUCKET_ELEMENTS = 1 << 24
"""Elements that go into one sum: many small tensors together, without a second copy of a large model."""


class LearnerExchange:
    """The group of learners of a run; with one learner nothing is exchanged.

    Every learner must make the same calls in the same order.

    Args:
        num_learners: how many there are.
        device: where the learner computes; tensors elsewhere take a way through it.
    """

    def __init__(self, num_learners: int, device: torch.device | str) -> None:
        self.num_learners = max(1, num_learners)
        self.rank = distributed.get_rank() if self.num_learners > 1 else 0
        self._device = torch.device(device)
        # Objects stay on the CPU, whatever tensors are exchanged by.
        self._objects = distributed.new_group(backend="gloo") if self.num_learners > 1 else None

    @torch.no_grad()
    def add_up(self, tensors: Sequence[torch.Tensor], group: distributed.ProcessGroup | None = None) -> None:
        """Replace each tensor by its sum over learners, in place, the same to the last bit on every one of them.

        Args:
            tensors: of the same shapes and dtypes on every learner.
            group: the learners; ``None``: all.
        """
        if self.num_learners == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1).to(self._device) for tensor in bucket])
            distributed.all_reduce(flat, group=group)
            sums = flat.split([tensor.numel() for tensor in bucket])
            for tensor, total in zip(bucket, sums, strict=True):
                tensor.copy_(total.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        """The values of all learners, by rank; small, picklable ones."""
        if self.num_learners == 1:
            return [value]
        values: list[Any] = [None] * self.num_learners
        distributed.all_gather_object(values, value)
        return values

    def swap(self, values: Mapping[int, bytes], senders: Sequence[int]) -> list[bytes]:
        """Send bytes to other learners.

        Args:
            values: what to send, by the rank of the learner that expects it.
            senders: ranks of those that send something here.

        Returns:
            What they sent, in the order of ``senders``.
        """
        sent = {rank: torch.frombuffer(bytearray(each), dtype=torch.uint8) for rank, each in values.items()}
        under_way = [
            distributed.isend(tensor, rank, self._objects)
            for rank, data in sent.items()
            for tensor in (torch.tensor([len(data)]), data)
        ]
        received = []
        for rank in senders:
            distributed.recv(size := torch.zeros(1, dtype=torch.int64), rank, self._objects)
            distributed.recv(data := torch.empty(int(size), dtype=torch.uint8), rank, self._objects)
            received.append(data.numpy().tobytes())
        for each in under_way:
            if each is not None:  # as for processes outside the group
                each.wait()
        return received


class GradientSums:
    """Sums of gradients over learners that each hold the whole model, made while the last backward pass of a step goes on.

    The backward pass reaches parameters from the last to the first, so that is the order of the buckets. A bucket's sum
    begins when its gradients are complete and those of all buckets before it have begun: learners begin them in one order,
    however many passes each of them makes.

    Args:
        parameters: what is trained, in the model's order; the same on every learner.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets: list[list[nn.Parameter]] = _buckets(parameters[::-1])
        self._incomplete: list[int] = []
        """Gradients that each bucket waits for; empty while more than one backward pass is left."""
        self._sums: list[distributed.Work] = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._completed, index))

    def begin(self) -> None:
        """Take the next backward pass as this learner's last one before :meth:`finish`."""
        self._incomplete = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Begin the sums that no backward pass began, and wait for all; each parameter's ``grad`` is then the sum."""
        while len(self._sums) < len(self._buckets):
            self._begin_next()
        for each in self._sums:
            each.wait()
        self._sums, self._incomplete = [], []

    def _completed(self, index: int, _: torch.Tensor) -> None:
        if not self._incomplete:
            return
        self._incomplete[index] -= 1
        while len(self._sums) < len(self._buckets) and not self._incomplete[len(self._sums)]:
            self._begin_next()

    @torch.no_grad()
    def _begin_next(self) -> None:
        bucket = self._buckets[len(self._sums)]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        flat = torch.cat([each.reshape(-1) for each in gradients])
        for parameter, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)
        work = distributed.all_reduce(flat, async_op=True)
        assert work is not None  # None is for processes outside the group
        self._sums.append(work)


class TrainingGroups(TrainingData):
    """Headers of the groups of an update and where their rollouts lie: :class:`GroupRefs` in ``episodes_refs``.

    RLlib would deal the references out to the learners. Here the plan of the update deals out rows, for which every
    learner makes the same plan from the headers of all.
    """

    def shard(self, num_shards: int, *args: Any, **kwargs: Any) -> list[tuple[TrainingGroups, dict[str, Any]]]:
        """The same references for each learner."""
        return [(self, {}) for _ in range(num_shards)]

    def solve_refs(self) -> None:
        """Nothing yet: learners must agree on what is lost, see :class:`GroupFetcher`."""


Plan = Callable[[list[TrajectoryGroup]], UpdatePlan]


class GroupFetcher:
    """Fetches of the groups of an update what one learner needs: the rollouts that it scores. It has headers of all.

    The few turns that it trains and another one scores come from that learner. A group is lost when the env runner that sampled
    it has died since. One of which any learner misses something is left out by all, and the others are planned again.

    Args:
        data: the same on every learner.
        exchange: the other learners.
        plan: makes the plan of the update from the groups' headers.
        whole: whether this learner needs all rollouts, whatever its share.
    """

    def __init__(self, data: TrainingGroups, exchange: LearnerExchange, plan: Plan, *, whole: bool = False) -> None:
        self._refs: list[GroupRefs] = data.episodes_refs
        self._exchange = exchange
        self._plan = plan
        self._whole = whole
        self._part_refs: dict[int, list[ObjectRef[list[Trajectory]]]] = {}
        self._parts: dict[tuple[int, int], list[Trajectory]] = {}

    def fetch(self) -> tuple[list[TrajectoryGroup], UpdatePlan]:
        """The groups that no learner misses, in order, and their plan; rollouts that were not fetched are headers.

        Raises:
            InfrastructureError: all groups are lost, or one did not arrive in time.
        """
        headers = [refs.header for refs in self._refs]
        kept = list(range(len(headers)))
        while kept:
            plan = self._plan([headers[index] for index in kept])
            if not (lost := self._agreed(self._fetch_parts(kept, headers, plan))):
                groups = [self._merged(index, headers[index]) for index in kept]
                if self._exchange.num_learners > 1 and not self._whole:
                    self._swap_turns(groups, plan)
                return groups, plan
            kept = [index for index in kept if index not in lost]
        raise InfrastructureError(
            f"All {len(self._refs)} groups of the update were lost before they could be trained on."
        )

    def _agreed(self, lost: set[int]) -> set[int]:
        """Numbers of the groups that any learner misses."""
        agreed: set[int] = set().union(*self._exchange.gather(lost))
        if agreed:
            logger.warning(
                "%d of %d groups were lost with the env runner that sampled them", len(agreed), len(self._refs)
            )
        return agreed

    def _fetch_parts(self, kept: list[int], headers: list[TrajectoryGroup], plan: UpdatePlan) -> set[int]:
        """Get what is needed and not here yet; returns the numbers of the groups that are lost."""
        needed = self._needed_parts(kept, headers, plan)
        groups = {index: self._refs[index].parts for index, _ in needed if index not in self._part_refs}
        self._part_refs |= _found(groups)
        wanted = [each for each in needed if each[0] in self._part_refs and each not in self._parts]
        self._parts |= _found({(index, part): self._part_refs[index][part] for index, part in wanted})
        return {index for index, part in needed if (index, part) not in self._parts}

    def _needed_parts(self, kept: list[int], headers: list[TrajectoryGroup], plan: UpdatePlan) -> list[tuple[int, int]]:
        """Group and part, each once, in order."""
        if self._whole or self._exchange.num_learners == 1:
            return [(index, part) for index in kept for part in range(self._refs[index].num_parts)]
        parts, turns = [], []
        for index in kept:
            rollouts = headers[index].trajectories
            bounds = part_bounds(len(rollouts), self._refs[index].num_parts)
            for part, (start, end) in enumerate(pairwise(bounds)):
                parts.append((index, part))
                turns.append(sum(len(each.turns) for each in rollouts[start:end] if each.survived))
        part_of_row = np.repeat(np.arange(len(parts)), turns)
        return [parts[number] for number in np.unique(part_of_row[plan.scoring[self._exchange.rank]])]

    def _merged(self, index: int, header: TrajectoryGroup) -> TrajectoryGroup:
        rollouts = list(header.trajectories)
        bounds = part_bounds(len(rollouts), self._refs[index].num_parts)
        for part, (start, end) in enumerate(pairwise(bounds)):
            rollouts[start:end] = self._parts.get((index, part), rollouts[start:end])
        return replace(header, trajectories=rollouts)

    def _swap_turns(self, groups: list[TrajectoryGroup], plan: UpdatePlan) -> None:
        """Put the turns that this learner trains and does not score into their trajectories."""
        rank, strays = self._exchange.rank, plan.strays()
        places = [
            (trajectory.turns, index)
            for group in groups
            for trajectory in group.survivors
            for index in range(len(trajectory.turns))
        ]
        given: dict[int, bytes] = {}
        for (scorer, trainer), rows in strays.items():
            if scorer == rank:
                given[trainer] = pack([turns[index] for turns, index in (places[row] for row in rows)])
        senders = [scorer for scorer, trainer in strays if trainer == rank]
        for sender, taken in zip(senders, self._exchange.swap(given, senders), strict=True):
            for row, turn in zip(strays[sender, rank], unpack(taken), strict=True):
                turns, index = places[row]
                turns[index] = turn


def _buckets(tensors: Sequence[AnyTensor]) -> list[list[AnyTensor]]:
    """Consecutive tensors of one dtype with at most ``BUCKET_ELEMENTS`` together, or a single larger one."""
    buckets: list[list[AnyTensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or tensor.dtype != buckets[-1][0].dtype or size + tensor.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets


def _found(refs: Mapping[Key, ObjectRef[T]]) -> dict[Key, T]:
    """The values that are not lost."""
    try:
        return dict(zip(refs, ray.get([*refs.values()], timeout=FETCH_TIMEOUT_S), strict=True))
    except ObjectLostError:
        if len(refs) > 1:
            return {key: value for each in refs.items() for key, value in _found(dict([each])).items()}
        logger.warning("a group of rollouts is lost", exc_info=True)
        return {}
    except GetTimeoutError as error:
        raise InfrastructureError(
            f"Groups of rollouts did not reach a learner within {FETCH_TIMEOUT_S:.0f} s."
        ) from error
