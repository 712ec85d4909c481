"""The RLModule around a transformers causal language model: the policy that the learner trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.models.folders import load_tensors, require_same_config, restore_tensors, write_model
from trial_ray.models.loading import fill, load_causal_lm, load_tokenizer
from trial_ray.models.logprobs import gather_divergence, gather_logprobs, hidden_states, output_head
from trial_ray.models.lora import ADAPTER_FOLDER, Adapter
from trial_ray.models.prefix_tree import PackedSequences
from trial_ray.models.sharding import ShardedModels, decoder_layers, gathered
from trial_ray.models.tensors import engine_tensors, from_arrays, stored_tensors, to_arrays

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HF_FOLDER = "hf"
"""Folder of a module checkpoint that holds the Hugging Face model, which vLLM and transformers load directly."""
TEACHER_FOLDER = "teacher"
"""Folder of a module checkpoint that holds the lagged teacher, where there is one."""
_MARKER = {"stored_as": HF_FOLDER}
"""State of a module whose tensors are elsewhere."""


class CausalLMModule(TorchRLModule):
    """A causal LM whose ``forward_train`` returns log-probabilities and entropies of given response tokens.

    Settings come from ``self.model_config`` (see ``GRPOConfig.policy``): ``model_path``, ``model_dtype``,
    ``compute_dtype``, ``gradient_checkpointing``, ``compile_layers``, ``lora``, ``with_reference``, ``with_teacher``. Checkpoints
    are Hugging Face folders, or an adapter's, and engines get their weights from the learner; a state that holds them is made
    only where a user asks for it.
    """

    model_config: dict[str, Any]

    def setup(self) -> None:
        """Make the model without its weights (see :meth:`load`), and the frozen reference where a KL term asks for one."""
        settings = self.model_config
        self.lm = load_causal_lm(settings["model_path"], settings["model_dtype"], weights=False)
        if settings["gradient_checkpointing"]:
            checkpoint_layers(self.lm)
        self.tokenizer = load_tokenizer(settings["model_path"])
        self.adapter: Adapter | None = None
        if settings["lora"] is not None:
            self.adapter = Adapter(self.lm, dtype=getattr(torch, settings["model_dtype"]), **settings["lora"])
        self.reference = self._frozen() if settings["with_reference"] and self.adapter is None else None
        self.teacher = self._frozen() if settings["with_teacher"] else None
        self.sharded: ShardedModels | None = None

    def _frozen(self) -> PreTrainedModel:
        """A model that is not trained and gets the policy's first weights."""
        settings = self.model_config
        return load_causal_lm(settings["model_path"], settings["model_dtype"], weights=False).requires_grad_(False)

    def load(self, device: torch.device, *, sharded: bool, fsdp_size: int | None = None) -> None:
        """Read the weights, one tensor after the other, to where they stay; the optimizer must be made afterwards.

        Args:
            device: of this learner. Of models that are not trained it holds the matrices at the compute dtype.
            sharded: whether each learner holds a part of every tensor.
            fsdp_size: as :class:`ShardedModels` takes it.

        Raises:
            ConfigError: there are no weights at the model's path, or the model cannot be sharded.
        """
        dtype = compute_dtype(self.model_config["compute_dtype"], device.type)
        self.sharded = ShardedModels(device, fsdp_size) if sharded else None
        for lm in (self.lm, self.reference, self.teacher):
            if lm is not None:
                hold_matrices_at(lm, dtype)
                if self.model_config["compile_layers"]:
                    compile_layers(lm)
                if self.sharded is not None:
                    self.sharded.shard(lm, dtype)
                fill(lm, self.model_config["model_path"], device)
        if self.adapter is not None:
            self.adapter.initialise()

    def finish_passes(self) -> None:
        """Where weights are sharded, take part in the other learners' passes until none has any left."""
        if self.sharded is not None:
            self.sharded.finish()

    @torch.no_grad()
    def renew_teacher(self) -> None:
        """Give the lagged teacher, where there is one, the policy's weights."""
        if self.teacher is not None:
            ours = stored_tensors(self.lm)
            for name, theirs in stored_tensors(self.teacher).items():
                theirs.copy_(ours[name])

    @contextlib.contextmanager
    def reference_model(self) -> Iterator[PreTrainedModel | None]:
        """The policy before training, while entered: a model of its own, or the policy without its adapter; or ``None``."""
        if self.adapter is not None and self.model_config["with_reference"]:
            with self.adapter.switched_off() as lm:
                yield lm
        else:
            yield self.reference

    def policy_parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates: the adapter's, or all (tied ones once; none of the reference)."""
        return [parameter for parameter in self.lm.parameters() if parameter.requires_grad]

    def parameter_names(self) -> dict[torch.Tensor, str]:
        """Names of the policy's parameters, the same on every learner."""
        return {parameter: name for name, parameter in self.lm.named_parameters()}

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their Hugging Face names, tied ones once, with the adapter merged into them: what engines are sent.

        Sharded weights are gathered one after the other, so every learner must go through all of them.

        Args:
            dtype: of the engines; ``None`` leaves the learner's.
        """
        if self.adapter is not None:
            whole = self.adapter.merged_weights()
        else:
            whole = ((name, gathered(tensor)) for name, tensor in stored_tensors(self.lm).items())
        return engine_tensors(self.lm, dtype, whole)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which forwards run at the compute dtype; FSDP casts sharded weights itself."""
        if self.sharded is not None:
            return contextlib.nullcontext()
        # Only now: RLlib moves the module to its device after setup.
        device = self.lm.device.type
        dtype = compute_dtype(self.model_config["compute_dtype"], device)
        return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        """Score response tokens.

        Args:
            batch: under ``"sequences"`` the :class:`PackedSequences` of some rows, T response tokens in all.
                Under ``"temperature"`` what divides the logits (1 if absent).
                Under ``"hindsight_sequences"``, on request, the teacher contexts of the same rows, with the arguments of
                :func:`generalised_jsd` under ``"divergence"``.
            kwargs: RLlib's, unused.

        Returns:
            ``logprobs`` and ``entropy`` in nats, ``[T]``, float32 or wider; on request ``divergence`` between the policy's
            distribution and the teacher's with the teacher context.
        """
        packed: PackedSequences = batch["sequences"]
        with self.autocast():
            hidden, head = _all_hidden_states(self.lm, packed), output_head(self.lm)
            logprobs, entropy = gather_logprobs(
                hidden, head, packed.targets, temperature=batch.get("temperature", 1.0), with_entropy=True
            )
            assert entropy is not None  # asked for
            outputs = {"logprobs": logprobs[packed.tokens], "entropy": entropy[packed.tokens]}
            if "hindsight_sequences" in batch:
                privileged: PackedSequences = batch["hindsight_sequences"]
                teacher = self.teacher or self.lm
                with torch.no_grad():
                    theirs = _all_hidden_states(teacher, privileged)[privileged.tokens]
                outputs["divergence"] = gather_divergence(
                    hidden[packed.tokens], head, theirs, output_head(teacher), **batch["divergence"]
                )
        if self.sharded is not None and torch.is_grad_enabled():
            outputs["logprobs"] = outputs["logprobs"] + self.sharded.before_backward()
        return outputs

    def tensors(self) -> dict[str, torch.Tensor]:
        """What training changes, by name: the adapter, or all weights, and those of the lagged teacher where there is one."""
        if self.adapter is not None:
            return dict(self.adapter.tensors())
        theirs = {} if self.teacher is None else stored_tensors(self.teacher)
        return {**stored_tensors(self.lm), **{f"{TEACHER_FOLDER}.{name}": tensor for name, tensor in theirs.items()}}

    def get_state(self, *args: Any, inference_only: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Copies of the module's tensors as arrays, by name; sharded ones are gathered, so every learner must call this.

        Args:
            args: RLlib's, unused.
            inference_only: a marker alone. RLlib asks for this state to give it to env runners, which hold no model: weights
                would go through the driver for nothing.
            kwargs: RLlib's, unused.
        """
        return dict(_MARKER) if inference_only else to_arrays(self.tensors())

    def set_state(self, state: dict[str, Any]) -> None:
        """Load what :meth:`get_state` gave; its marker changes nothing.

        Raises:
            CheckpointError: the state is of another model; nothing was changed.
        """
        if state != _MARKER:
            from_arrays(state, self.tensors())

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write RLlib's metadata, the tokenizer and, unless they are sharded, the present weights (see :meth:`save_weights`)."""
        saved_at: str = super().save_to_path(path, state=dict(_MARKER), **kwargs)
        self.tokenizer.save_pretrained(Path(saved_at) / (HF_FOLDER if self.adapter is None else ADAPTER_FOLDER))
        if self.sharded is None:
            self.save_weights(Path(saved_at))
        return saved_at

    def save_weights(self, folder: Path, write: bool = True) -> None:
        """Write the model in Hugging Face format below ``folder``, and the lagged teacher where there is one; or the adapter.

        Sharded weights are gathered one after the other, so every learner must call this; one of them writes.
        """
        if self.adapter is not None:
            self.adapter.save(folder / ADAPTER_FOLDER, write)
            return
        for lm, name in ((self.lm, HF_FOLDER), (self.teacher, TEACHER_FOLDER)):
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
            CheckpointError: files are missing, or another model or other adapters than this one wrote them.
        """
        model = Path(path) / (HF_FOLDER if self.adapter is None else ADAPTER_FOLDER)
        if (model / "tokenizer_config.json").is_file() and (
            load_tokenizer(str(model)).get_vocab() != self.tokenizer.get_vocab()
        ):
            raise CheckpointError(f"{model} has another vocabulary than the model_path. Set model_path as in the run.")
        if self.adapter is not None:
            self.adapter.load(model)
            return
        require_same_config(self.lm.config, model)
        restore_tensors(stored_tensors(self.lm), model)
        if self.teacher is not None:
            load_tensors(stored_tensors(self.teacher), Path(path) / TEACHER_FOLDER)


def _all_hidden_states(lm: PreTrainedModel, packed: PackedSequences) -> torch.Tensor:
    """Last hidden states of the predicting nodes of all packs, ``[U, H]``: the backward pass needs them together."""
    return torch.cat([states for states, _ in hidden_states(lm, packed)])


def compute_dtype(setting: str | None, device: str) -> torch.dtype | None:
    """Type of autocast on a device (``"cuda"``, ``"cpu"``); ``None`` means no autocast, the weights' own type."""
    setting = setting or ("bfloat16" if device == "cuda" else "float32")
    return None if setting == "float32" else getattr(torch, setting)


def checkpoint_layers(lm: PreTrainedModel) -> None:
    """Let the backward pass compute the activations of each decoder layer again; nothing else changes.

    transformers checkpoints the layers that are in training mode, which also switches dropout and a router's noise on: only the
    flag of the layer is set, and only until its own code runs.

    Raises:
        ConfigError: transformers cannot checkpoint the layers of this architecture.
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
    """Compile the decoder layers, each by itself, for any number of tokens; all of a model's layers share what is compiled."""
    for layer in decoder_layers(lm):
        layer.compile(backend=COMPILE_BACKEND, dynamic=True)


def hold_matrices_at(lm: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Keep the matrices of a frozen model's linear layers at the type to which autocast would convert them for each use.

    Log-probabilities do not change by a bit. What autocast leaves as it is (norms, the embedding and a head tied to it)
    stays; ``None`` means no autocast.
    """
    if dtype is None:
        return
    embedding = lm.get_input_embeddings().weight
    for module in lm.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(dtype)


def merge_adapter(folder: Path, target: Path) -> None:
    """Write the model that an adapter in peft's format makes of its base model to ``target``, in Hugging Face format.

    Raises:
        CheckpointError: the base model is not where it was when the adapter was trained.
    """
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(folder))
    base = str(config.base_model_name_or_path)
    if not Path(base).is_dir():
        raise CheckpointError(f"{folder} is an adapter of the model in {base}, which is missing. Restore it there.")
    lm = load_causal_lm(base, "float32")
    adapter = Adapter(
        lm, rank=config.r, alpha=config.lora_alpha, targets=sorted(config.target_modules), dtype=torch.float32, seed=0
    )
    adapter.load(folder)
    write_model(lm, adapter.merged_weights(), target)


MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices: large enough to be bound by arithmetic, small enough to be timed several times."""
MATMUL_SECONDS = 0.3


def matmul_rate(device: torch.device | str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product: the best of those that fit into :data:`MATMUL_SECONDS`.

    Args:
        device: where the learner computes; with a CPU, torch's threads of this process take part.
        dtype: in which its matrix products are.
    """
    device = torch.device(device)
    size = MATMUL_SIZES.get(device.type, 1024)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    (left @ right)[0, 0].item()  # the first product loads kernels and chooses among them
    best, began = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - began < MATMUL_SECONDS:
        (left @ right)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
