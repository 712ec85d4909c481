"""Traces of code that runs on fake tensors: memory of every storage, and arithmetic and traffic of every operation.

Fake tensors have shapes and no memory, so that a learner of a model of any size runs on a small machine. What the trace sees is
what autograd, FSDP2 and the optimizer do; what it does not see: kernels' own workspaces, and how an allocator rounds.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

SMALL = 2**18
"""Tensors that the code makes out of nothing are real below this many elements, so that indices and masks have values."""
FLOAT32_COST = 16
"""Time of a float32 product over that of a bfloat16 one, on A100 and H100 without TF32."""
aten = torch.ops.aten


@torch.library.custom_op("trace::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for FlexAttention's kernel: output like the query, and the log-sum-exp ``[B, heads, L]``; scores are never held."""
    raise NotImplementedError("It is only traced.")


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("trace::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizer: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its gradients of query, key and value."""
    raise NotImplementedError("It is only traced.")


@attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizer: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return attention_backward(gradient, *ctx.saved_tensors)


attention.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("trace::wide_product", mutates_args=())
def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``torch.mm(left, right, out_dtype=torch.float32)``, which torch has for CUDA alone."""
    raise NotImplementedError("It is only traced.")


@wide_product.register_fake
def _(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)


@dataclass(slots=True)
class Work:
    """What an operation does, or several together.

    Attributes:
        flops: of its matrix products and attention.
        moved: bytes of inputs and outputs.
        wide: whether the inputs are float32.
    """

    flops: float = 0.0
    moved: float = 0.0
    wide: bool = False

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Roofline of a device: the longer of its arithmetic, at the peak of bfloat16 products, and its traffic."""
        return max(self.flops * (FLOAT32_COST if self.wide else 1) / flops, self.moved / bandwidth)


class OpTrace(TorchDispatchMode):
    """Follows operations on fake tensors while entered.

    Args:
        fake: the mode that makes them.
        visible_keys: keys that a query of attention sees, on average.

    Attributes:
        phase: name under which what happens is counted; ``None``: not at all.
        peaks: most bytes alive at a time, by phase.
        work: operations' work by phase and name.
        live: bytes alive now.
        tokens: inputs of the model, by phase.
    """

    def __init__(self, fake: FakeTensorMode, visible_keys: float) -> None:
        super().__init__()
        self.phase: str | None = None
        self.peaks: dict[str, int] = {}
        self.work: dict[tuple[str, str], list[Work]] = defaultdict(list)
        self.live = 0
        self.tokens: dict[str, int] = defaultdict(int)
        self.fake = fake
        self._visible_keys = visible_keys
        self._sizes: dict[int, tuple[int, str]] = {}
        self._events: list[tuple[int, int, str]] = []
        self._peak_events: dict[str, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> OpTrace:
        def resize(storage: torch.UntypedStorage, size: int) -> None:
            # FSDP frees and takes the memory of gathered weights so.
            self._resize(storage, size)
            if (key := storage._cdata) in self._sizes:
                self._change(key, storage.nbytes(), self._sizes[key][1])

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what happens inside under this name."""
        outer, self.phase = self.phase, phase
        self._note_peak()
        try:
            yield
        finally:
            self.phase = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it desugars into operations on local parts
        kwargs = kwargs or {}
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        fakes = [each for each in leaves if isinstance(each, FakeTensor)]
        if func is aten._local_scalar_dense.default and fakes:
            # Losses, norms, and flags: all is finite, nothing is any NaN.
            return getattr(fakes[0], "truth", True) if fakes[0].dtype == torch.bool else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        nested = active_fake_mode() not in (None, self.fake)  # where DTensor finds the shapes of a result
        if nested or (not fakes and not _makes_large(func, args)):
            return func(*args, **kwargs)
        with self.fake:
            result = func(*args, **kwargs)
        if func.overloadpacket in (aten.any, aten.ne, aten.isnan):
            result.truth = False
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        name = str(func)
        for each in outputs:
            self._follow(each, name)
        if func.overloadpacket is aten.logsumexp:  # its kernels exponentiate a copy
            self._follow(torch.empty_like(args[0]), name)
        if self.phase is not None:
            self._count(func, name, args, kwargs, result, leaves, outputs)
        return result

    # -- memory ------------------------------------------------------------------------------------------------------

    def _follow(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or not isinstance(tensor, FakeTensor):
            return
        weakref.finalize(storage, self._change, key, 0, "").atexit = False
        self._change(key, storage.nbytes(), f"{name} {list(tensor.shape)} {tensor.dtype}")

    def _change(self, key: int, size: int, name: str) -> None:
        before = self._sizes.get(key, (0, ""))
        self._sizes[key] = (size, name or before[1])
        if not name:
            del self._sizes[key]
        self.live += size - before[0]
        self._events.append((key, size, name))
        self._note_peak()

    def _note_peak(self) -> None:
        if self.phase is not None and self.live > self.peaks.get(self.phase, 0):
            self.peaks[self.phase], self._peak_events[self.phase] = self.live, len(self._events)

    def held_at_peak(self, phase: str) -> dict[str, int]:
        """Bytes of what was alive at the peak of a phase, by operation, shape and type."""
        alive: dict[int, tuple[int, str]] = {}
        for key, size, name in self._events[: self._peak_events[phase]]:
            alive[key] = (size, name)
        found: dict[str, int] = defaultdict(int)
        for size, name in alive.values():
            found[name] += size
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    # -- work --------------------------------------------------------------------------------------------------------

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, leaves: Any, outputs: Any) -> None:
        assert self.phase is not None
        if func is aten.embedding.default:
            self.tokens[self.phase] += args[1].numel()
        work = Work()
        inputs = {each.untyped_storage()._cdata for each in leaves}
        made = [each for each in outputs if each.untyped_storage()._cdata not in inputs]
        in_place = func._schema.is_mutable
        if not made and not in_place:
            return  # a view
        if "empty" not in name and "c10d" not in name and "fsdp" not in name:
            work.moved = sum(map(_bytes, leaves)) + sum(map(_bytes, outputs if in_place else made))
        if (flops := self._flops(func, args, kwargs, result)) > 0:
            work.flops, work.wide = flops, leaves[0].dtype == torch.float32
        self.work[self.phase, name].append(work)

    def _flops(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func.overloadpacket
        if packet is torch.ops.trace.wide_product:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            return 2.0 * rows * inner * columns
        if packet in (torch.ops.trace.attention, torch.ops.trace.attention_backward):
            backward = packet is torch.ops.trace.attention_backward
            # Two products forward; five backward, with that of the scores once more.
            return (10.0 if backward else 4.0) * args[0].numel() * self._visible_keys
        if packet in flop_registry:
            return float(flop_registry[packet](*args, **kwargs, out_val=result))
        return 0.0


def _makes_large(func: Any, args: Any) -> bool:
    """Whether an operation makes a large tensor out of none."""
    shape = args[0] if args and isinstance(args[0], (list, tuple)) else []
    return func._schema.arguments[:1] != [] and func._schema.arguments[0].name == "size" and math.prod(shape) >= SMALL


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that an operation reads or writes of a tensor: elements that an expanded dimension repeats once."""
    repeated = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        repeated *= max(1, size) if stride == 0 else 1
    return tensor.numel() * tensor.element_size() // repeated


def start_fake_learners(number: int) -> None:
    """A process group of so many learners of which this process is the first, and whose exchanges do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    distributed.init_process_group("fake", rank=0, world_size=number, store=distributed.HashStore())
