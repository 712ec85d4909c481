"""Exchange between data-parallel learners: sums of tensors, small objects of each learner, and the groups that all of them have."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.rllib.core.learner.training_data import TrainingData
from torch import distributed, nn

from trial_ray.errors import InfrastructureError
from trial_ray.rollout.trajectory import TrajectoryGroup

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
    """The groups of an update, in the object store: references to them in ``episodes_refs``.

    RLlib would deal the references out to the learners. Here the plan of the update deals out rows, for which every learner
    makes the same plan from all of them.
    """

    def shard(self, num_shards: int, *args: Any, **kwargs: Any) -> list[tuple[TrainingGroups, dict[str, Any]]]:
        """The same references for each learner."""
        return [(self, {}) for _ in range(num_shards)]

    def solve_refs(self) -> None:
        """Nothing yet: learners must agree on what is lost, see :func:`fetch_groups`."""


def fetch_groups(refs: Sequence[ObjectRef[TrajectoryGroup]], exchange: LearnerExchange) -> list[TrajectoryGroup]:
    """The groups that no learner misses, in order, the same on every one of them.

    One is lost when the env runner that sampled it has died since.

    Raises:
        InfrastructureError: one did not arrive in time.
    """
    found = _found(refs)
    own = {index for index, group in enumerate(found) if group is None}
    if lost := set[int]().union(*exchange.gather(own)):
        logger.warning("%d of %d groups were lost with the env runner that sampled them", len(lost), len(refs))
    return [group for index, group in enumerate(found) if group is not None and index not in lost]


def _found(refs: Sequence[ObjectRef[TrajectoryGroup]]) -> list[TrajectoryGroup | None]:
    """The groups, ``None`` for those that are lost."""
    try:
        return list(ray.get([*refs], timeout=FETCH_TIMEOUT_S))
    except ObjectLostError:
        if len(refs) > 1:
            return [group for ref in refs for group in _found([ref])]
        logger.warning("a group of rollouts is lost", exc_info=True)
        return [None]
    except GetTimeoutError as error:
        raise InfrastructureError(
            f"Groups of rollouts did not reach a learner within {FETCH_TIMEOUT_S:.0f} s."
        ) from error


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
