"""RLModule around a transformers causal language model: the policy that the learner trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trial_ray.errors import CheckpointError, ConfigError, refusing
from trial_ray.models.folders import NamedTensors, load_tensors, require_same_config, restore_tensors, write_model
from trial_ray.models.layout import score_views
from trial_ray.models.loading import fill, load_causal_lm, load_tokenizer
from trial_ray.models.logprobs import all_hidden_states, gather_divergence, gather_logprobs, output_head
from trial_ray.models.lora import ADAPTER_FOLDER, Adapter
from trial_ray.models.prefix_tree import PackedSequences, ScoredSequence
from trial_ray.models.sharding import ShardedModels, decoder_layers, gathered
from trial_ray.models.tensors import engine_tensors, from_arrays, stored_tensors, to_arrays

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_layers(lm: PreTrainedModel) -> None:
    """Make the backward pass recompute the activations of each decoder layer; nothing else changes.

    transformers checkpoints only layers in training mode, which also enables dropout and a router's noise. Therefore, only the
    layer's own ``training`` flag is set, and it is cleared while the layer's code runs.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"transformers cannot checkpoint the layers of {type(lm).__name__}; set gradient_checkpointing=False, or choose "
            "another model."
        )
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        vars(layer)["_gradient_checkpointing_func"] = partial(_checkpointed, layer)


def _checkpointed(layer: nn.Module, call: Callable[..., Any], *args: Any) -> Any:
    def without_training(*args: Any) -> Any:
        layer.training = False
        try:
            return call(*args)
        finally:
            layer.training = True

    return checkpoint(without_training, *args, use_reentrant=False, preserve_rng_state=False)


COMPILE_BACKEND = "inductor"


def compile_layers(lm: PreTrainedModel) -> None:
    """Compile each decoder layer separately, for any number of tokens; all layers of a model share the compiled code."""
    for layer in decoder_layers(lm):
        layer.compile(backend=COMPILE_BACKEND, dynamic=True)


def store_matrices_as(lm: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Store frozen matrices of linear layers in ``dtype``, to which autocast would convert them in each pass.

    Log-probabilities stay identical to the bit. Tensors that autocast does not convert (norms, the embedding and a head tied to
    it) are not changed. If ``dtype`` is ``None``, there is no autocast, and nothing is changed.
    """
    if dtype is None:
        return
    embedding = lm.get_input_embeddings().weight
    for module in lm.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(dtype)


HF_FOLDER = "hf"
"""Folder of a module checkpoint that contains the Hugging Face model, which vLLM and transformers load directly."""
TEACHER_FOLDER = "teacher"
"""Folder of a module checkpoint that contains the stale teacher (an earlier policy), if any."""
_MARKER = {"stored_as": HF_FOLDER}
"""Module state in RLlib's files: it has no tensors, because checkpoints store the tensors in separate folders."""


_NO_ACTIONS = (
    "an action is a text of many tokens, which an engine samples. trial-ray export writes the policy's Hugging Face folder, which "
    "transformers and vLLM load; in this process, the attributes lm and tokenizer are transformers' model and tokenizer"
)


@refusing(
    {
        "_forward forward_inference forward_exploration "
        "get_inference_action_dist_cls get_exploration_action_dist_cls get_train_action_dist_cls": _NO_ACTIONS
    }
)
class CausalLMModule(TorchRLModule):
    """Causal LM with a ``forward_train`` that returns log-probabilities and entropies of given response tokens.

    Settings come from ``self.model_config`` (see ``GRPOConfig.rl_module``): ``model_path``, ``model_dtype``, ``compute_dtype``,
    ``gradient_checkpointing``, ``compile_layers``, ``lora``, ``with_reference``, ``with_stale_teacher``, ``teacher_model``.
    Checkpoints are folders of a Hugging Face model or of an adapter. Engines get their weights from the learner; a state that
    contains the weights is made only if a user requests it.
    """

    model_config: dict[str, Any]

    def setup(self) -> None:
        """Create the policy and, if required, the reference and the teacher, all without their weights (see :meth:`load`)."""
        settings = self.model_config
        self.lm = load_causal_lm(settings["model_path"], settings["model_dtype"], weights=False)
        if settings["gradient_checkpointing"]:
            checkpoint_layers(self.lm)
        self.tokenizer = load_tokenizer(settings["model_path"])
        self.adapter: Adapter | None = None
        if settings["lora"] is not None:
            self.adapter = Adapter(self.lm, dtype=getattr(torch, settings["model_dtype"]), **settings["lora"])
        self.reference = self._frozen() if settings["with_reference"] and self.adapter is None else None
        has_teacher = settings["with_stale_teacher"] or settings["teacher_model"] is not None
        self.teacher = self._frozen(settings["teacher_model"]) if has_teacher else None
        self.sharded: ShardedModels | None = None

    def _frozen(self, model_path: str | None = None) -> PreTrainedModel:
        """Create a frozen model, still without weights, for ``model_path``, or for the policy's path if it is ``None``."""
        settings = self.model_config
        path = model_path or settings["model_path"]
        return load_causal_lm(path, settings["model_dtype"], weights=False).requires_grad_(False)

    @property
    def stale_teacher(self) -> PreTrainedModel | None:
        """The teacher if it is an earlier policy (saved in checkpoints); ``None`` if it is another model or does not exist."""
        return self.teacher if self.model_config["with_stale_teacher"] else None

    def load(self, device: torch.device, *, sharded: bool, fsdp_size: int | None = None) -> None:
        """Load the weights of all models onto the device, one tensor after the other, before the optimizer is created.

        Frozen matrices of linear layers are stored in the compute dtype.

        Args:
            device: device of this learner.
            sharded: whether each learner stores a part of every tensor.
            fsdp_size: number of learners that share one copy of sharded weights; all learners if it is ``None``.

        Raises:
            ConfigError: there are no weights at the path of a model, or a model cannot be sharded.
        """
        dtype = compute_dtype(self.model_config["compute_dtype"], device.type)
        self.sharded = ShardedModels(device, fsdp_size) if sharded else None
        for lm in (self.lm, self.reference, self.teacher):
            if lm is not None:
                store_matrices_as(lm, dtype)
                if self.model_config["compile_layers"]:
                    compile_layers(lm)
                if self.sharded is not None:
                    self.sharded.shard(lm, dtype)
                teacher_model = self.model_config["teacher_model"] if lm is self.teacher else None
                fill(lm, teacher_model or self.model_config["model_path"], device)
        if self.adapter is not None:
            self.adapter.initialise()

    def _require_weights(self) -> None:
        """Load the weights on the CPU if no learner has loaded them, for example in a module from a spec's ``build()``."""
        if next(self.lm.parameters()).is_meta:
            self.load(torch.device("cpu"), sharded=False)

    def finish_passes(self) -> None:
        """If weights are sharded, take part in the other learners' passes until all have finished."""
        if self.sharded is not None:
            self.sharded.finish()

    @torch.no_grad()
    def renew_teacher(self) -> None:
        """Copy the policy's weights into the stale teacher, if any."""
        if self.stale_teacher is not None:
            policy = stored_tensors(self.lm)
            for name, tensor in stored_tensors(self.stale_teacher).items():
                tensor.copy_(policy[name])

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[PreTrainedModel | None]:
        """Return a context that yields the policy before training: a separate model, the model without adapter, or ``None``."""
        if self.adapter is not None and self.model_config["with_reference"]:
            with self.adapter.switched_off() as lm:
                yield lm
        else:
            yield self.reference

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the names of the policy's parameters, the same on every learner."""
        return {parameter: name for name, parameter in self.lm.named_parameters()}

    def named_weights(self, dtype: torch.dtype | None = None) -> NamedTensors:
        """Yield the weights to send to engines: Hugging Face names, tied weights once, with the adapter merged into them.

        Sharded weights are gathered one after the other, so every learner must iterate over all of them.

        Args:
            dtype: dtype of the engines; ``None`` keeps the learner's.
        """
        if self.adapter is not None:
            whole = self.adapter.merged_weights()
        else:
            whole = ((name, gathered(tensor)) for name, tensor in stored_tensors(self.lm).items())
        return engine_tensors(self.lm, dtype, whole)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which forward passes run at the compute dtype; FSDP casts sharded weights itself."""
        if self.sharded is not None:
            return contextlib.nullcontext()
        # Read the device here: RLlib moves the module after setup().
        device = self.lm.device.type
        dtype = compute_dtype(self.model_config["compute_dtype"], device)
        return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """Score response tokens.

        Args:
            batch: ``"sequences"`` is the :class:`PackedSequences` of some rows, T response tokens in all.
                ``"hindsight_sequences"`` (optional) has the same rows with their teacher contexts; ``"divergence"`` then has
                the arguments ``mix`` and ``temperature`` of :func:`gather_divergence`.
            kwargs: RLlib's, unused.

        Returns:
            ``logprobs`` and ``entropy`` in nats, ``[T]``, float32 or wider; with ``"hindsight_sequences"``, also the
            ``divergence`` between the policy's distribution and the teacher's.
        """
        packed: PackedSequences = batch["sequences"]
        with self.autocast():
            hidden, head = all_hidden_states(self.lm, packed), output_head(self.lm)
            logprobs, entropy = gather_logprobs(hidden, head, packed.targets, packed.temperatures, second="entropy")
            outputs = {"logprobs": logprobs[packed.tokens], "entropy": entropy[packed.tokens]}
            if "hindsight_sequences" in batch:
                hindsight: PackedSequences = batch["hindsight_sequences"]
                teacher = self.teacher or self.lm
                with torch.no_grad():
                    teacher_hidden = all_hidden_states(teacher, hindsight)[hindsight.tokens]
                temperatures = None if packed.temperatures is None else packed.temperatures[packed.tokens]
                outputs["divergence"] = gather_divergence(
                    hidden[packed.tokens],
                    head,
                    teacher_hidden,
                    output_head(teacher),
                    temperatures,
                    **batch["divergence"],
                )
        if self.sharded is not None and torch.is_grad_enabled():
            outputs["logprobs"] = outputs["logprobs"] + self.sharded.before_backward()
        return outputs

    def text_logprobs(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Compute the log-probabilities of all tokens of a text except the first, by the same passes as in training.

        Learners that share weights must all call this.

        Args:
            ids: token ids of the text, int32 ``[P]``, at least two.

        Returns:
            float32 ``[P - 1]``, in nats.
        """
        with self.autocast():
            views = {"text": [ScoredSequence(ids, len(ids) - 1)]}
            scores, _ = score_views(self.lm, views, max_tokens=len(ids))
        self.finish_passes()
        return scores["text"].float().cpu().numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that change in training, by name: the adapter's, or the policy's and the stale teacher's."""
        if self.adapter is not None:
            return dict(self.adapter.tensors())
        teacher = {} if self.stale_teacher is None else stored_tensors(self.stale_teacher)
        return {**stored_tensors(self.lm), **{f"{TEACHER_FOLDER}.{name}": tensor for name, tensor in teacher.items()}}

    def get_state(self, *args: Any, inference_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Copy the module's tensors to arrays, by name; sharded tensors are gathered, so every learner must call this.

        Args:
            args: RLlib's, unused.
            inference_only: whether to return a state without tensors. RLlib requests it for env runners, which have no model;
                with tensors, weights would pass through the driver for nothing.
            kwargs: RLlib's, unused.
        """
        if inference_only:
            return dict(_MARKER)
        self._require_weights()
        return to_arrays(self.tensors())

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`get_state`; a state without tensors changes nothing.

        Raises:
            CheckpointError: the state belongs to another model; nothing was changed.
        """
        if state != _MARKER:
            self._require_weights()
            from_arrays(state, self.tensors())

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write RLlib's metadata, the tokenizer and, unless weights are sharded, the weights (see :meth:`save_weights`)."""
        self._require_weights()
        saved_at: str = super().save_to_path(path, state=dict(_MARKER), **kwargs)
        self.tokenizer.save_pretrained(Path(saved_at) / (HF_FOLDER if self.adapter is None else ADAPTER_FOLDER))
        if self.sharded is None:
            self.save_weights(Path(saved_at))
        return saved_at

    def save_weights(self, folder: Path, write: bool = True) -> None:
        """Write the adapter below ``folder`` or, without LoRA, the model and the stale teacher (if any) in Hugging Face format.

        Sharded weights are gathered one after the other, so every learner must call this, but only one with ``write=True``.
        """
        if self.adapter is not None:
            self.adapter.save(folder / ADAPTER_FOLDER, write)
            return
        for lm, name in ((self.lm, HF_FOLDER), (self.stale_teacher, TEACHER_FOLDER)):
            if lm is None:
                continue
            weights = ((name, gathered(tensor)) for name, tensor in stored_tensors(lm).items())
            if write:
                write_model(lm, weights, folder / name)
            else:
                for _ in weights:
                    pass

    def restore_from_path(self, path: str | Path, **kwargs: Any) -> None:
        """Load the weights that :meth:`save_to_path` wrote.

        Raises:
            CheckpointError: files are missing, or contain another model or adapter.
        """
        model = Path(path) / (HF_FOLDER if self.adapter is None else ADAPTER_FOLDER)
        if (model / "tokenizer_config.json").is_file() and (
            load_tokenizer(model).get_vocab() != self.tokenizer.get_vocab()
        ):
            raise CheckpointError(f"{model} has another vocabulary than the model_path. Set model_path as in the run.")
        self._require_weights()  # RLlib's from_checkpoint() creates a module without a learner that loads its weights.
        if self.adapter is not None:
            self.adapter.load(model)
            return
        require_same_config(self.lm.config, model)
        restore_tensors(stored_tensors(self.lm), model)
        if self.stale_teacher is not None:
            load_tensors(stored_tensors(self.stale_teacher), Path(path) / TEACHER_FOLDER)


def compute_dtype(setting: str | None, device: str) -> torch.dtype | None:
    """Return the autocast dtype for ``setting`` on a ``device`` type such as ``"cuda"``, or ``None`` for no autocast."""
    setting = setting or ("bfloat16" if device == "cuda" else "float32")
    return None if setting == "float32" else getattr(torch, setting)


MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices that :func:`matmul_rate` multiplies, by type of device."""
MATMUL_SECONDS = 0.3


def matmul_rate(device: torch.device | str, dtype: torch.dtype) -> float:
    """Measure floating-point operations per second of a large matrix product, the best result within :data:`MATMUL_SECONDS`.

    Args:
        device: device of the learner; on a CPU, torch's threads of this process take part.
        dtype: type of the learner's matrix products.
    """
    device = torch.device(device)
    size = MATMUL_SIZES.get(device.type, 1024)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    (left @ right)[0, 0].item()  # Do not time the first product: it also loads and selects kernels.
    shortest, began = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - began < MATMUL_SECONDS:
        (left @ right)[0, 0].item()  # item() waits for the device.
        shortest = min(shortest, time.perf_counter() - start)
    return 2 * size**3 / shortest
