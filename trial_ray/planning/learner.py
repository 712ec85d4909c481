"""Memory of a learner by phase, held against recorded traces (``docs/results/measurements/trace.json``)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trial_ray.models.logprobs import DEFAULT_CHUNK_TOKENS
from trial_ray.planning.actor import DEVICE_CONTEXT_BYTES, PROCESS_BYTES, Memory
from trial_ray.planning.request import PlanRequest

HEAP_FACTOR = 1.1
"""Memory of a process over that of its tensors, for what passes allocate: allocators keep freed blocks; measured on the CPU."""
SCORING_LOGITS, FORWARD_LOGITS, BACKWARD_LOGITS, LAST_LOGITS = 2, 4, 5, 1.5
"""Float32 arrays of ``[chunk, vocabulary]`` that are alive when a chunk is scored, when its entropies are computed too, when these
are differentiated, and when the head's own gradient is computed; counted in ``docs/results/measurements/trace.json``."""


def learner_memory(request: PlanRequest) -> Memory:
    """Peak of one learner on its device: that of the phase with the largest one."""
    return max(learner_phases(request).values(), key=lambda memory: memory.total)


def learner_phases(request: PlanRequest) -> dict[str, Memory]:
    """Peak of one learner by phase: scoring, the forward and backward passes of an update, and the optimizer's step.

    A pass peaks in a decoder layer or in the output head, whichever holds more. All passes but the first of a minibatch find the
    gradients of those before them.
    """
    sizes = _LearnerSizes(request)
    kept = sizes.kept()
    gradients = {"gradients": sizes.trained * request.model_bytes / sizes.shards}
    # For flags of finiteness of the largest tensor: its absolute values and three arrays of bool.
    flags = (request.model_bytes + 3) * request.shape.embedding_parameters / sizes.shards
    moments = {
        "scoring": sizes.scoring(),
        "forward": [gradients | each for each in sizes.forward()],
        "backward": [gradients | each for each in sizes.backward()],
        "step": [gradients | {"temporaries": 0.0 if request.lora_rank else flags}],
    }
    return {
        phase: max((sizes.memory(kept, each) for each in found), key=lambda memory: memory.total)
        for phase, found in moments.items()
    }


class _LearnerSizes:
    """Bytes of a learner's tensors, from which its phases are put together."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, shape = request, request.shape
        self.sharded = request.sharding == "fsdp"
        self.shards = request.shards
        self.trained = trained_parameters(request)
        self.frozen_bytes = min(request.compute_bytes, request.model_bytes)
        self.casts = autocasts(request)
        self.stream_bytes = stream_bytes(request)
        self.head = shape.vocabulary * shape.hidden
        self.root = shape.embedding_parameters + (0 if shape.tied else self.head)
        self.layer = (shape.parameters - self.root) / shape.layers
        # A row that is longer than the limit of a pass still goes in whole.
        rows = math.ceil(request.minibatch_rows / request.num_learners)
        self.tokens = max(request.row_tokens, min(request.max_tokens_per_forward, rows * request.row_tokens))
        self.targets = min(rows, math.ceil(self.tokens / request.row_tokens)) * request.max_response_tokens
        self.logits = 4 * min(DEFAULT_CHUNK_TOKENS, self.targets) * shape.vocabulary

    def memory(self, kept: Mapping[str, float], items: Mapping[str, float]) -> Memory:
        """Of one learner with these items beside what it keeps, and what an allocator does not give back of them."""
        request = self.request
        passing = (HEAP_FACTOR - 1) * (items.get("activations", 0.0) + items.get("logits", 0.0))
        everything = {**kept, **items, "allocator": passing}
        on_gpu = request.num_gpus_per_learner > 0
        return Memory("learner", request.num_learners, on_gpu, everything, kept=sum(kept.values()))

    def kept(self) -> dict[str, float]:
        """What stays between updates. Of frozen models, matrices are kept in the compute dtype, the embedding is not."""
        request, shape = self.request, self.request.shape
        held = shape.embedding_parameters * request.model_bytes
        frozen = (shape.parameters - shape.embedding_parameters) * self.frozen_bytes + held
        return {
            "weights": (frozen if request.lora_rank else shape.parameters * request.model_bytes) / self.shards,
            "adapters": self.trained * request.model_bytes / self.shards if request.lora_rank else 0.0,
            "optimizer": 2 * self.trained * request.model_bytes / self.shards,
            "reference": request.num_references * frozen / self.shards,
            "process": DEVICE_CONTEXT_BYTES if request.num_gpus_per_learner else PROCESS_BYTES,
        }

    def scoring(self) -> list[dict[str, float]]:
        """In a layer and in the head, both without gradient."""
        roots = 1 + self.request.num_references  # gathered, they stay so until all models have scored
        weights = self._weights(roots) | {"activations": self._layer_forward()}
        head = {"logits": SCORING_LOGITS * self.logits, "activations": self._states()}
        return [weights, self._weights(roots, with_head=True) | head]

    def forward(self) -> list[dict[str, float]]:
        """In the last layer and in the head, with what is kept for the backward pass."""
        saved = self._saved()
        layer = self._weights() | {"activations": saved + self._layer_forward()}
        head = {"activations": saved + self._states(), "logits": FORWARD_LOGITS * self.logits}
        return [layer, self._weights(with_head=True) | head]

    def backward(self) -> list[dict[str, float]]:
        """In the head, whose chunks add up its gradient, and in the last layer."""
        request, shape = self.request, self.request.shape
        kept_casts = self._weights(with_head=True)
        if request.gradient_checkpointing and not self.sharded:  # copies are made again, layer by layer
            kept_casts = {"weights in compute dtype": self._head_copy()}
        all_trained = not request.lora_rank
        head_bytes = request.compute_bytes if self.sharded else request.model_bytes
        summed = all_trained * self.head * head_bytes
        product = all_trained * self.head * (4 + self.sharded * head_bytes) + LAST_LOGITS * self.logits
        several = self.targets > DEFAULT_CHUNK_TOKENS
        saved = self._saved()
        head = {
            "logits": max(BACKWARD_LOGITS * self.logits, product) + several * summed,
            "activations": saved + 2 * self._states(),
        }
        # A layer's gradients, of two arrays as wide as the feed-forward network and one as the residual stream; checkpointed,
        # everything that it saves, once more.
        widths = 2 * shape.intermediate * request.compute_bytes + shape.hidden * self.stream_bytes
        again = layer_bytes_per_token(request) if request.gradient_checkpointing else 0.0
        own = self.layer * request.compute_bytes * (self.casts and request.gradient_checkpointing)
        exchanged = all_trained * self.layer * (4 + request.compute_bytes) * self.sharded
        weights = sum(self._weights().values()) if self.sharded or not request.gradient_checkpointing else own
        layer = {
            "weights in compute dtype": weights + exchanged,
            "head's gradient": summed * shape.tied,
            "activations": self._saved_by_layers() + self.tokens * (again + widths),
        }
        return [kept_casts | head, layer]

    def _weights(self, roots: int = 1, with_head: bool = False) -> dict[str, float]:
        """Copies in the compute dtype: autocast's of all layers until a pass ends, or what FSDP has gathered."""
        request = self.request
        if self.sharded:
            copies = (roots * self.root + (not with_head) * 2 * self.layer) * request.compute_bytes
        else:
            cast = self.trained if request.lora_rank else request.shape.layers * self.layer
            copies = self.casts * cast * request.compute_bytes + with_head * self._head_copy()
        return {"weights in compute dtype": copies}

    def _head_copy(self) -> float:
        """The head's matrix in the compute dtype, of which a frozen model that does not share it with the embedding needs none."""
        copied = self.casts and (self.request.shape.tied or not self.request.lora_rank)
        return self.head * self.request.compute_bytes * copied

    def _saved_by_layers(self) -> float:
        """All layers' saved arrays, or their inputs."""
        request, shape = self.request, self.request.shape
        layer = shape.hidden * self.stream_bytes if request.gradient_checkpointing else layer_bytes_per_token(request)
        return self.tokens * shape.layers * layer

    def _saved(self) -> float:
        """The same, and what the last norm saves."""
        return self._saved_by_layers() + self.tokens * self.request.shape.hidden * (self.stream_bytes + 4)

    def _layer_forward(self) -> float:
        """Arrays of a layer that nothing keeps: four of the residual stream, three as wide as the feed-forward network, or four."""
        request, shape = self.request, self.request.shape
        widths = (3 + bool(request.lora_rank)) * shape.intermediate
        return self.tokens * (4 * shape.hidden * self.stream_bytes + widths * request.compute_bytes)

    def _states(self) -> float:
        """Hidden states of the predicting tokens."""
        return self.targets * self.request.shape.hidden * self.stream_bytes


def autocasts(request: PlanRequest) -> bool:
    """Whether autocast converts weights and inputs; FSDP gathers weights in the compute dtype instead."""
    return request.compute_bytes != request.model_bytes and request.sharding != "fsdp"


def stream_bytes(request: PlanRequest) -> int:
    """Bytes of a number of the residual stream: under autocast it has the embedding's type, with FSDP the compute dtype."""
    return request.model_bytes if autocasts(request) else request.compute_bytes


def trained_parameters(request: PlanRequest) -> int:
    """Parameters that the optimizer updates: of the adapters, or all."""
    return lora_parameters(request) or request.shape.parameters


def lora_parameters(request: PlanRequest) -> int:
    """Parameters of adapters of rank r on all linear layers of the decoder: r (inputs + outputs) each; 0 without adapters."""
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = 2 * (shape.hidden + query) + 2 * (shape.hidden + key) + 3 * (shape.hidden + shape.intermediate)
    return request.lora_rank * shape.layers * widths


def layer_bytes_per_token(request: PlanRequest) -> float:
    """Bytes that autograd saves of one token in one decoder layer.

    Each of two norms saves its input in float32 and the normalised input in the residual stream's type. Each linear layer saves
    its input in the compute dtype: one array for those that share it, or, under autocast, a copy for each. Attention saves query,
    key, value, output and float32 sums of a number a head, the gated feed-forward network four arrays of its width, norms of query
    and key what the others save. Adapters save a copy of attention's output, which they convert to their type and back.
    """
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * shape.hidden * (4 + stream_bytes(request)) + shape.qk_norm * (query + key) * (4 + request.compute_bytes)
    inputs = (5 if autocasts(request) else 2) * shape.hidden + 4 * shape.intermediate
    attention = (2 + bool(request.lora_rank)) * query + 2 * key
    return norms + (inputs + attention) * request.compute_bytes + 4 * shape.heads
