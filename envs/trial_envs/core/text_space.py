"""Gymnasium space of texts with any characters, with shared memory for Gymnasium's vector environments."""

from __future__ import annotations

import string
from collections.abc import Sequence
from multiprocessing.heap import BufferWrapper
from typing import overload

from gymnasium.spaces import Text
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

from trial_envs.errors import ObservationTooLongError

MAX_TEXT = 1_000_000
"""Maximum length of observations and actions, in characters.

The maximum is far above the usual lengths, because a WebShop page or a model's response may have any length. A large
maximum costs nothing: a write to shared memory copies only the text, and memory pages that are never written are not allocated.
"""

_HEADER = 8
"""Size in bytes of the header of a text in shared memory, which contains the text's length in bytes."""
_MAX_SAMPLE = 30


class AnyText(Text):
    """A ``Text`` space that contains every string up to its maximum length, with any characters.

    Product pages and model responses may have characters of any script. Samples are printable ASCII.
    """

    def __init__(self, max_length: int = MAX_TEXT, *, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable, seed=seed)

    def contains(self, x: object) -> bool:
        """Return whether ``x`` is a string of at most ``max_length`` characters."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Return a printable string of 1 to 30 characters; masks and probabilities are ignored."""
        length = int(self.np_random.integers(1, min(self.max_length, _MAX_SAMPLE) + 1))
        return "".join(self.np_random.choice(list(self.character_list), size=length))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"


class SharedTexts(Sequence[str]):
    """The observations of a vector environment, read from shared memory on every access; a deep copy is a tuple of strings."""

    def __init__(self, buffers: list[BufferWrapper]) -> None:
        self._views = [buffer.create_memoryview() for buffer in buffers]

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(map(_read, self._views[index]))
        return _read(self._views[index])

    def __deepcopy__(self, memo: dict[int, object]) -> tuple[str, ...]:
        return tuple(self)


def _read(view: memoryview) -> str:
    size = int.from_bytes(view[:_HEADER], "little")
    return str(view[_HEADER : _HEADER + size], "utf-8", "surrogatepass")


# Gymnasium 1.2 reads a Text space's shared memory only once, before anything is written to it, so an AsyncVectorEnv of text
# environments would always return the memory's initial content. For ``AnyText``, Gymnasium calls the three functions below.


@create_shared_memory.register(AnyText)
def _create_shared_text(space: AnyText, n: int = 1, ctx: object = None) -> list[BufferWrapper]:
    """Return ``n`` buffers, each for a text of the maximum length; memory pages that are never written are not allocated."""
    buffers = [BufferWrapper(_HEADER + 4 * space.max_length) for _ in range(n)]
    for buffer in buffers:
        buffer.create_memoryview()[:_HEADER] = bytes(_HEADER)  # A reused block of memory may contain old data.
    return buffers


@read_from_shared_memory.register(AnyText)
def _read_shared_texts(space: AnyText, shared_memory: list[BufferWrapper], n: int = 1) -> SharedTexts:
    return SharedTexts(shared_memory)


@write_to_shared_memory.register(AnyText)
def _write_shared_text(space: AnyText, index: int, value: str, shared_memory: list[BufferWrapper]) -> None:
    encoded = value.encode("utf-8", "surrogatepass")
    view = shared_memory[index].create_memoryview()
    if _HEADER + len(encoded) > len(view):
        raise ObservationTooLongError(
            f"The observation has {len(value)} characters, and the space {space} has room for {space.max_length} in shared memory. "
            "Give the observation space a larger max_length, or the AsyncVectorEnv shared_memory=False."
        )
    view[_HEADER : _HEADER + len(encoded)] = encoded
    view[:_HEADER] = len(encoded).to_bytes(_HEADER, "little")
