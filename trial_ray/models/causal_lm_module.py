"""The RLModule around a transformers causal language model: the policy that the learner trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.models import tree_attention
from trial_ray.models.logprobs import check_plain_head, gather_divergence, gather_logprobs, hidden_states
from trial_ray.models.prefix_tree import PackedSequences

HF_FOLDER = "hf"
"""Folder of a module checkpoint that holds the Hugging Face model, which vLLM and transformers load directly."""
TEACHER_FOLDER = "teacher"
"""Folder of a module checkpoint that holds the lagged teacher, where there is one."""


class CausalLMModule(TorchRLModule):
    """A causal LM whose ``forward_train`` returns log-probabilities and entropies of given response tokens.

    Settings come from ``self.model_config`` (see ``GRPOConfig.policy``): ``model_path``, ``model_dtype``,
    ``compute_dtype``, ``gradient_checkpointing``, ``with_reference``, ``with_teacher``. Checkpoints are
    Hugging Face folders; weights never travel through RLlib's state dictionaries, which would pass through numpy and
    the driver.
    """

    model_config: dict[str, Any]

    def setup(self) -> None:
        """Load the model, its tokenizer, and the frozen reference where a KL term asks for one."""
        settings = self.model_config
        self.lm = load_causal_lm(settings["model_path"], settings["model_dtype"])
        check_plain_head(self.lm)
        if settings["gradient_checkpointing"]:
            # transformers checkpoints only in training mode; dropout is off either way.
            self.lm.gradient_checkpointing_enable()
            self.lm.train()
        self.tokenizer = load_tokenizer(settings["model_path"])
        self.reference: PreTrainedModel | None = None
        if settings["with_reference"]:
            self.reference = load_causal_lm(settings["model_path"], settings["model_dtype"]).requires_grad_(False)
        self.teacher: PreTrainedModel | None = None
        if settings["with_teacher"]:
            self.teacher = load_causal_lm(settings["model_path"], settings["model_dtype"]).requires_grad_(False)

    @torch.no_grad()
    def renew_teacher(self) -> None:
        """Give the lagged teacher, where there is one, the policy's weights."""
        if self.teacher is not None:
            for ours, theirs in zip(self.lm.parameters(), self.teacher.parameters(), strict=True):
                theirs.copy_(ours)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates (tied ones once; none of the reference)."""
        return list(self.lm.parameters())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their Hugging Face names, tied ones once: what engines are sent."""
        return ((name, parameter.detach()) for name, parameter in self.lm.named_parameters())

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which forwards run at the compute dtype."""
        # Only now: RLlib moves the module to its device after setup.
        device = self.lm.device.type
        dtype = compute_dtype(self.model_config["compute_dtype"], device)
        return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        """Score response tokens.

        Args:
            batch: under ``"sequences"`` the :class:`PackedSequences` of some rows, T response tokens in all.
                Under ``"temperature"`` what divides the logits (1 if absent).
                Under ``"hindsight_sequences"``, on request, the privileged views of the same rows, with the arguments of
                :func:`generalised_jsd` under ``"divergence"``.
            kwargs: RLlib's, unused.

        Returns:
            ``logprobs`` and ``entropy`` in nats, ``[T]``, float32 or wider; on request ``divergence`` between the policy's
            distribution and the teacher's with the privileged view.
        """
        packed: PackedSequences = batch["sequences"]
        with self.autocast():
            hidden, head = hidden_states(self.lm, packed), self.lm.get_output_embeddings()
            logprobs, entropy = gather_logprobs(
                hidden, head, packed.targets, temperature=batch.get("temperature", 1.0), with_entropy=True
            )
            assert entropy is not None  # asked for
            outputs = {"logprobs": logprobs[packed.tokens], "entropy": entropy[packed.tokens]}
            if "hindsight_sequences" in batch:
                privileged: PackedSequences = batch["hindsight_sequences"]
                teacher = self.teacher or self.lm
                with torch.no_grad():
                    theirs = hidden_states(teacher, privileged)[privileged.tokens]
                teacher_head = teacher.get_output_embeddings()
                outputs["divergence"] = gather_divergence(
                    hidden[packed.tokens], head, theirs, teacher_head, **batch["divergence"]
                )
        return outputs

    # RLlib would pull these through the driver at build, evaluation and restore; the weights go by file and by the
    # engines' weight transfer instead, so the state is a marker.

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a marker; see :meth:`save_to_path`."""
        return {"stored_as": HF_FOLDER}

    def set_state(self, state: dict[str, Any]) -> None:
        """Accept the marker that :meth:`get_state` returns; weights come from :meth:`restore_from_path`."""

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write RLlib's metadata and, below ``hf/``, the model and tokenizer in Hugging Face format."""
        saved_at: str = super().save_to_path(path, state=state or self.get_state(), **kwargs)
        folder = Path(saved_at) / HF_FOLDER
        self.lm.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.teacher is not None:
            self.teacher.save_pretrained(Path(saved_at) / TEACHER_FOLDER)
        return saved_at

    def restore_from_path(self, path: str | Path, **kwargs: Any) -> None:
        """Load the weights that :meth:`save_to_path` wrote.

        Raises:
            CheckpointError: files are missing, or their tensors do not fit this model.
        """
        _load_weights(self.lm, Path(path) / HF_FOLDER)
        if self.teacher is not None:
            _load_weights(self.teacher, Path(path) / TEACHER_FOLDER)


def compute_dtype(setting: str | None, device: str) -> torch.dtype | None:
    """Type of autocast on a device (``"cuda"``, ``"cpu"``); ``None`` means no autocast, the weights' own type."""
    setting = setting or ("bfloat16" if device == "cuda" else "float32")
    return None if setting == "float32" else getattr(torch, setting)


def _load_weights(lm: PreTrainedModel, folder: Path) -> None:
    """Copy the weights in ``folder`` into ``lm``, all of them or none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; expected a checkpoint written by this version.")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = dict(lm.named_parameters())
    if missing := sorted(set(expected) - set(tensors)):
        raise CheckpointError(f"{folder} lacks {len(missing)} of the model's tensors, the first being {missing[0]!r}.")
    for name, parameter in expected.items():
        if parameter.shape != tensors[name].shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, the model expects {list(parameter.shape)}."
            )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        ConfigError: there is none at ``model_path``.
    """
    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"No tokenizer could be loaded from {model_path!r}: {_first_line(error)}") from error


def load_causal_lm(model_path: str, dtype: str) -> PreTrainedModel:
    """Load a causal LM in evaluation mode at ``dtype`` (torch's name of it), without dropout.

    Raises:
        ConfigError: there is none at ``model_path``.
    """
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), attn_implementation=tree_attention.register()
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"No causal LM could be loaded from {model_path!r}: {_first_line(error)}") from error
    _switch_off_dropout(lm)
    return lm


def _switch_off_dropout(lm: PreTrainedModel) -> None:
    """Behaviour, scoring and training must be one and the same policy, whatever mode the modules are in."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # torch knows tensors and modules as attributes only


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
