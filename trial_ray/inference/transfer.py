"""How a learner hands its weights to the engines: one interface, three backends.

``object_store`` goes by way of the host's memory, from anywhere to anywhere. ``ipc`` lets an engine read the memory of the
learner on the same GPU. ``nccl`` broadcasts from the first learner's GPU to the engines' own. An exchange has four steps,
whichever backend it takes: every learner offers its weights; every engine loads what was offered, while every learner
transmits; each engine compares the checksums of what it then has with those of the offer, and answers with them; every
learner withdraws its offer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from ray.actor import ActorHandle

from trial_ray.errors import WeightSyncError
from trial_ray.inference.weights import DeviceWeights, Weights

BACKENDS = ("object_store", "ipc", "nccl")

NamedWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Gives the names and tensors of a checkpoint, a tied tensor once, each time it is called.

Where the model is sharded, it gathers one tensor after the other, and every learner has to iterate it.
"""


class WeightSender(ABC):
    """The learner's side of one backend; every learner of a run has one, and all make the same calls.

    Args:
        rank: of the learner; the first one sends where one is enough.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @abstractmethod
    def offer(
        self, weights: NamedWeights, version: int, dtype: torch.dtype | None, engines: Sequence[ActorHandle[Any]]
    ) -> Weights | None:
        """Prepare one version.

        Args:
            weights: of the policy.
            version: 0 or more.
            dtype: that of the engines, to which floating-point tensors are cast; ``None`` leaves them as they are.
            engines: who will load it.

        Returns:
            What the engines are given; ``None`` from a learner that has nothing to add.
        """

    def transmit(self) -> None:  # noqa: B027  # most backends have nothing to do here
        """Send, while the engines load; where they read the offer by themselves, there is nothing to do."""

    def withdraw(self) -> None:  # noqa: B027
        """Free what the offer kept: every engine has loaded it, or has failed to."""


def merge_offers(offers: Sequence[Weights | None]) -> Weights:
    """The offers of all learners as one.

    Raises:
        WeightSyncError: there is none, or learners offer different weights.
    """
    given = [offer for offer in offers if offer is not None]
    if not given:
        raise WeightSyncError("No learner offered weights to the engines; expected one at least.")
    first = given[0]
    if differing := {(offer.checksum, offer.arrangement) for offer in given} - {(first.checksum, first.arrangement)}:
        raise WeightSyncError(
            f"Learners hold different weights: checksum {first.checksum} on the first (arrangement {first.arrangement}), "
            f"{sorted(differing)} on others. "
            "Resume from the last checkpoint."
        )
    if not isinstance(first, DeviceWeights) or first.backend != "ipc":
        return first
    # Each tensor lies on every learner's GPU; an engine takes the handle of its own.
    per_tensor = zip(*(offer.update["ipc_handles"] for offer in given if isinstance(offer, DeviceWeights)), strict=True)
    handles = [{gpu: args for of_learner in each for gpu, args in of_learner.items()} for each in per_tensor]
    return replace(first, update={**first.update, "ipc_handles": handles})


def cast_weights(weights: NamedWeights, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as engines hold them: detached, contiguous, floating-point ones as ``dtype``."""
    for name, tensor in weights():
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, tensor.contiguous()
