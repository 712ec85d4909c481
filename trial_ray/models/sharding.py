"""Weights sharded over learners with FSDP2 (``fully_shard``), and the forward passes that these learners make together.

Each decoder layer is one unit: its weights are gathered for its forward pass and again for its backward pass. Embedding, last
norm and output head (tied or not) form another unit, the root, which is gathered once per pass. Every gather and every sum of
gradients is a collective. Learners that share one copy of the weights must therefore make the same passes, which
:class:`ShardedModels` ensures. With several copies, for example one on each node, only the gradient sums of a whole step are
exchanged between copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, cast

import ray
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

_IDLE, _READY, _PASSES = 0, 1, 2
"""Numbers of a learner's next step: nothing, a backward pass, or (from ``_PASSES`` on) a forward pass of one of the models."""


class ShardedModels:
    """Shards the weights of models over learners. Each copy of the weights is split over some of the learners, or over all.

    Learners make unequal numbers of forward passes, which are not known in advance. Before each pass, all learners of a copy
    therefore agree on the next step: among the steps that they need, the one with the largest number (``_IDLE`` < ``_READY`` <
    forward passes). A learner that needs another step, or none, makes an empty pass instead: one token, with a loss of
    weight 0. All calls of a model's decoder take part automatically. The caller must do two things: call :meth:`before_backward`
    after the forward passes that precede a backward pass, and :meth:`finish` when this learner has no more passes to make.

    Args:
        device: device of the learner.
        size: number of learners that share a copy, a divisor of the number of learners; all learners if it is ``None``.
            Learners of the same node share a copy if possible.

    Attributes:
        copies_group: process group of the learners that have the same part of each copy; ``None`` if there is one copy.
    """

    def __init__(self, device: torch.device, size: int | None) -> None:
        self._device = device
        mesh = DeviceMesh(device.type, _copies(size), mesh_dim_names=("copy", "part"))
        self.copies_group = mesh.get_group("copy") if mesh.size(0) > 1 else None
        self._mesh = mesh["part"]
        self._models: list[Any] = []  # The models have an additional method, run_decoder.
        self._empty_outputs: list[Tensor] = []

    def shard(self, lm: PreTrainedModel, compute_dtype: torch.dtype | None) -> None:
        """Keep only this learner's part of the weights, and move it to the device.

        Args:
            lm: the model, the same on every learner.
            compute_dtype: dtype of its passes, with gradients added up in float32; ``None`` uses the weights' dtype for both.

        Raises:
            ConfigError: the model's decoder layers were not found.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy()
        if compute_dtype is not None:
            mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for module in [*decoder_layers(lm), lm]:
            fully_shard(module, mesh=self._mesh, mp_policy=mixed)
        for module in lm.modules():
            if isinstance(module, FSDPModule):
                # Each microbatch's loss is weighted by its share of the step, so gradients are added up, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # Some parameters can be unused on a learner, such as those of experts to which none of its tokens are routed.
        cast(FSDPModule, lm).set_reduce_scatter_unused_params(True)
        self._intercept(lm)

    def _intercept(self, lm: Any) -> None:
        """Replace the decoder's forward method by one that first agrees with the other learners on the next step.

        It also gathers the weights of the root unit: embedding, last norm and output head.
        """
        from torch.distributed.fsdp import register_fsdp_forward_method

        decoder, index = decoder_of(lm), len(self._models)
        lm.run_decoder = decoder.forward
        register_fsdp_forward_method(lm, "run_decoder")
        self._models.append(lm)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._agree_on(_PASSES + 2 * index + torch.is_grad_enabled())
            return lm.run_decoder(*args, **kwargs)

        decoder.forward = forward

    def before_backward(self) -> Tensor:
        """Wait until no learner that shares this copy of the weights has a forward pass left before its backward pass.

        Until then, this learner makes an empty pass (a forward pass of one token) for every forward pass of another learner.

        Returns:
            Zero, shape (), to add to an output of the forward pass, so that the backward pass includes this learner's empty passes.
        """
        self._agree_on(_READY)
        return self._pop_empty_outputs()

    def finish(self) -> None:
        """Take part in the other learners' passes until all have finished, and then free the gathered weights."""
        while (agreed := self._next_step(_IDLE)) != _IDLE:
            if agreed == _READY:
                self._pop_empty_outputs().backward()
            else:
                self._empty_pass(agreed)
        for lm in self._models:
            lm.reshard()

    def _agree_on(self, step: int) -> None:
        """Make empty passes until ``step`` is the next step of all learners that share a copy of the weights with this learner."""
        while (agreed := self._next_step(step)) != step:
            self._empty_pass(agreed)

    def _next_step(self, step: int) -> int:
        """Return the next step of all learners that share this copy of the weights: the largest of the steps that they need.

        The largest is taken so that all forward passes precede the backward pass, and no learner finishes before the others.

        Args:
            step: the step that this learner needs next.
        """
        largest = torch.tensor(step, device=self._device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, self._mesh.get_group())
        return int(largest)

    def _empty_pass(self, agreed: int) -> None:
        index, with_gradient = divmod(agreed - _PASSES, 2)
        lm, token = self._models[index], torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        with torch.set_grad_enabled(bool(with_gradient)):
            hidden = lm.run_decoder(input_ids=token, use_cache=False).last_hidden_state
            if with_gradient:
                self._empty_outputs.append(lm.get_output_embeddings()(hidden).sum())

    def _pop_empty_outputs(self) -> Tensor:
        outputs, self._empty_outputs = self._empty_outputs, []
        return 0.0 * sum(outputs, torch.zeros((), device=self._device))


def _copies(size: int | None) -> Tensor:
    """Return the ranks of the learners that share each copy of the weights, ``[copies, size]``; ranks of one node are adjacent."""
    nodes: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(nodes, ray.util.get_node_ip_address())
    ranks = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    return torch.tensor(ranks).view(-1, size or len(ranks))


def decoder_of(lm: PreTrainedModel) -> nn.Module:
    """Return the module between a model's token ids and its last hidden states."""
    from transformers import PreTrainedModel

    decoder: nn.Module = lm.get_decoder()
    if decoder is not lm:
        return decoder
    # get_decoder() only searches the usual attribute names, and the decoder of some models has another name.
    return next(child for child in lm.children() if isinstance(child, PreTrainedModel))


def decoder_layers(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder's layers: modules of the classes in ``_no_split_modules``, which must not be split over devices.

    Raises:
        ConfigError: no layers were found.
    """
    names = set(lm._no_split_modules or ())
    layers = [module for module in decoder_of(lm).modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"No decoder layers were found in {type(lm).__name__} (looked for modules of the classes in its _no_split_modules, "
            f"{sorted(names)}): it can neither be sharded nor have adapters. Set sharding='none' and lora_rank=None, or choose "
            "another model."
        )
    return layers


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a ``DTensor``, without importing the class, which takes half a second."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor; a sharded tensor is gathered from all learners, so every learner must call this."""
    tensor = tensor.detach()
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


@torch.no_grad()
def copy_whole(whole: Tensor, into: Tensor) -> None:
    """Copy a whole tensor into a tensor that may be sharded; learners do not communicate."""
    if _is_sharded(into):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(into.to_local().device, into.dtype)
        whole = distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(whole)


def local_part(tensor: Tensor) -> Tensor:
    """Return this learner's part of a tensor, sharing its memory; the whole tensor if it is not sharded."""
    return tensor.to_local() if _is_sharded(tensor) else tensor
