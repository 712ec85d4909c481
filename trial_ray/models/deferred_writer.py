"""Files of a checkpoint, written while the process that holds the tensors computes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from trial_ray.errors import CheckpointError
from trial_ray.process_memory import available_memory

MEMORY_SHARE = 0.5
"""Of the memory that the machine has left, what copies of tensors may take; with less, files are written at once."""


class DeferredWriter:
    """Writes files at once; while :attr:`deferring`, later, on a thread of its own, from copies of their tensors.

    Attributes:
        deferring: whether what is written from now on may be written later.
    """

    def __init__(self) -> None:
        self.deferring = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writes: list[Future[Any]] = []

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """What may be written later in the tensor's place: a copy in the host's memory, or the tensor, if not deferring."""
        return tensor.detach().to("cpu", copy=True) if self.deferring else tensor

    def kept_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """The same for names and tensors that a generator may make one after the other."""
        return [(name, self.kept(tensor)) for name, tensor in weights] if self.deferring else weights

    def write(self, call: Callable[[], object]) -> None:
        """Make a call that writes files, of tensors that :meth:`kept` gave."""
        if self.deferring:
            self._writes.append(self._thread.submit(call))
        else:
            call()

    def watch(self, write: Future[Any]) -> None:
        """Count a write that another library has begun as one of these."""
        self._writes.append(write)

    def finished(self) -> bool:
        """Whether everything has been written.

        Raises:
            CheckpointError: something could not be written; said once.
        """
        if not all(write.done() for write in self._writes):
            return False
        writes, self._writes = self._writes, []
        for error in filter(None, (write.exception() for write in writes)):
            raise CheckpointError(f"The checkpoint could not be written: {type(error).__name__}: {error}") from error
        return True


def copies_fit(num_bytes: int) -> bool:
    """Whether copies of so many bytes leave the machine enough memory."""
    available = available_memory()
    return available is not None and num_bytes <= MEMORY_SHARE * available
