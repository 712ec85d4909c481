"""Communication between data-parallel learners: sums of tensors, small objects, and rollout groups that all learners fetched."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.rllib.core.learner.training_data import TrainingData
from torch import Tensor, distributed, nn

from trial_ray.errors import InfrastructureError, UnsupportedError
from trial_ray.trajectory import TrajectoryGroup

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0

BUCKET_ELEMENTS = 1 << 24
"""Maximum number of elements in one all-reduce; a larger tensor has an all-reduce of its own. Each all-reduce copies its tensors
into one buffer. Small tensors therefore need few all-reduces, and a large model is never copied as a whole."""


class LearnerExchange:
    """Exchanges tensors and objects between the learners of a run; with one learner, nothing is exchanged.

    Every learner must make the same calls in the same order.

    Args:
        num_learners: number of learners.
        device: device of the learner; tensors on other devices are exchanged through it.
    """

    def __init__(self, num_learners: int, device: torch.device | str) -> None:
        self.num_learners = max(1, num_learners)
        self.rank = distributed.get_rank() if self.num_learners > 1 else 0
        self._device = torch.device(device)

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor], group: distributed.ProcessGroup | None = None) -> None:
        """Replace each tensor by its sum over learners, in place; the sums are bitwise equal on every learner.

        Args:
            tensors: of the same shapes and dtypes on every learner.
            group: process group of the learners whose tensors are added up, or ``None`` for all learners.
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
        """Return the values of all learners, by rank; the values must be small and picklable."""
        if self.num_learners == 1:
            return [value]
        values: list[Any] = [None] * self.num_learners
        distributed.all_gather_object(values, value)
        return values


class GradientSums:
    """Adds up gradients over learners that each hold the whole model, during the last backward pass of an optimizer step.

    Gradients are added up in buckets, with one all-reduce for each bucket. The backward pass reaches parameters from the last to
    the first, and the buckets are in this order. The sum of a bucket starts when its gradients are complete and the sums of all
    buckets before it have started. All learners therefore start the sums in the same order, even if they make different numbers
    of backward passes.

    Args:
        parameters: trained parameters in the model's order; the same on every learner.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets: list[list[nn.Parameter]] = _buckets(parameters[::-1])
        self._incomplete: list[int] = []
        """Number of each bucket's gradients that a step's last backward pass has yet to complete; empty before :meth:`begin`."""
        self._sums: list[distributed.Work] = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._completed, index))

    def begin(self) -> None:
        """Treat the next backward pass as this learner's last one before :meth:`finish`."""
        self._incomplete = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Start the sums that no backward pass has started, and wait for all sums; each ``grad`` is then a sum over learners."""
        while len(self._sums) < len(self._buckets):
            self._begin_next()
        for pending in self._sums:
            pending.wait()
        self._sums, self._incomplete = [], []

    def _completed(self, index: int, _: Tensor) -> None:
        if not self._incomplete:
            return
        self._incomplete[index] -= 1
        while len(self._sums) < len(self._buckets) and not self._incomplete[len(self._sums)]:
            self._begin_next()

    @torch.no_grad()
    def _begin_next(self) -> None:
        bucket = self._buckets[len(self._sums)]
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter, part in zip(bucket, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            parameter.grad = part.view_as(parameter)
        work = distributed.all_reduce(flat, async_op=True)
        assert work is not None  # all_reduce() returns None only to processes outside the process group.
        self._sums.append(work)


class TrainingGroups(TrainingData):
    """Training data with references to an update's groups in Ray's object store, in ``episodes_refs``.

    RLlib would split the references among the learners. Here, every learner gets all groups and makes the same ``UpdatePlan``,
    which divides the turns among the learners.
    """

    def shard(self, num_shards: int, *args: Any, **kwargs: Any) -> list[tuple[TrainingGroups, dict[str, Any]]]:
        """Return the same references for each learner."""
        return [(self, {}) for _ in range(num_shards)]

    def solve_refs(self) -> None:
        """Do nothing; RLlib's method would fetch the groups.

        Instead, :func:`fetch_groups` fetches them, and drops a group on all learners if one learner cannot fetch it.
        """


def training_refs(
    data: TrainingData | None, groups: Sequence[TrajectoryGroup] | None, others: Mapping[str, Any]
) -> list[ObjectRef[TrajectoryGroup]]:
    """Return the references to an update's groups; empty if the groups themselves are given.

    Args:
        data: the ``training_data`` of RLlib's ``update()``.
        groups: the ``episodes`` of ``update()``.
        others: the other arguments of ``update()``; all must be empty.

    Raises:
        UnsupportedError: there is neither ``data`` nor ``groups``, or another argument has a value.
    """
    given = [name for name, value in others.items() if value]
    refs = [] if data is None else list(data.episodes_refs or ())
    if given or not (refs or groups):
        raise UnsupportedError(
            "update() takes training_data=TrainingGroups(episodes_refs=[...]) with references to TrajectoryGroup objects, or "
            f"on a learner those objects as episodes, but got {' and '.join(given) or 'neither'}. The config's settings determine "
            "epochs and minibatches."
        )
    return refs


def fetch_groups(refs: Sequence[ObjectRef[TrajectoryGroup]], exchange: LearnerExchange) -> list[TrajectoryGroup]:
    """Return the groups that every learner could fetch, in order, the same on all learners.

    A group is lost if the env runner that sampled it has died.

    Raises:
        InfrastructureError: a group did not arrive in time, or all are lost.
    """
    fetched = _fetch(refs)
    missing = {index for index, group in enumerate(fetched) if group is None}
    if lost := set[int]().union(*exchange.gather(missing)):
        logger.warning("%d of %d groups were lost with the env runner that sampled them", len(lost), len(refs))
    groups = [group for index, group in enumerate(fetched) if group is not None and index not in lost]
    if not groups:
        raise InfrastructureError(f"The update has no group to train on: all {len(refs)} were lost.")
    return groups


def _fetch(refs: Sequence[ObjectRef[TrajectoryGroup]]) -> list[TrajectoryGroup | None]:
    """Return the groups in order, with ``None`` for each lost group."""
    try:
        return list(ray.get([*refs], timeout=FETCH_TIMEOUT_S))
    except ObjectLostError:
        if len(refs) > 1:
            return [group for ref in refs for group in _fetch([ref])]
        logger.warning("a group of rollouts is lost", exc_info=True)
        return [None]
    except GetTimeoutError as error:
        raise InfrastructureError(
            f"Groups of rollouts did not reach a learner within {FETCH_TIMEOUT_S:.0f} s."
        ) from error


def _buckets(tensors: Sequence[AnyTensor]) -> list[list[AnyTensor]]:
    """Split tensors into consecutive buckets of one dtype, each of at most ``BUCKET_ELEMENTS`` elements or of one larger tensor."""
    buckets: list[list[AnyTensor]] = []
    size = 0
    for tensor in tensors:
        if not buckets or tensor.dtype != buckets[-1][0].dtype or size + tensor.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += tensor.numel()
    return buckets
