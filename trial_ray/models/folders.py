"""Model folders: found, checked and written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trial_ray.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INDEX_FILE = "model.safetensors.index.json"
FILE_BYTES = 512 * 2**20
"""A file of weights is closed once it holds this much, which is the most that is in memory at a time."""


def write_model(lm: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write ``lm``'s configuration and the given weights to ``folder`` (created), from where transformers and vLLM load them.

    Args:
        lm: whose configuration and generation settings.
        weights: names and whole tensors, a tied tensor once; may be a generator that makes one at a time.
        folder: holds no model yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lm.config.save_pretrained(folder)
    if lm.generation_config is not None:
        lm.generation_config.save_pretrained(folder)
    written: list[list[str]] = []
    total = 0
    for part in _parts(weights):
        total += sum(tensor.nbytes for tensor in part.values())
        save_file(part, _part_file(folder, len(written)), metadata={"format": "pt"})
        written.append(list(part))
    if len(written) == 1:
        _part_file(folder, 0).rename(folder / "model.safetensors")
        return
    names = [f"model-{index + 1:05d}-of-{len(written):05d}.safetensors" for index in range(len(written))]
    for index, name in enumerate(names):
        _part_file(folder, index).rename(folder / name)
    weight_map = {tensor: name for name, tensors in zip(names, written, strict=True) for tensor in tensors}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_tensors(parameters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy the tensors in ``folder`` into parameters of the same names, whole or sharded; all of them or none.

    Raises:
        CheckpointError: files are missing, or their tensors do not fit.
    """
    from trial_ray.models.sharding import copy_whole  # not at the top: a config, which imports this, needs no FSDP

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; expected a checkpoint written by this version.")
    shapes = {name: shape for file in files for name, shape, _ in _headers(file)}
    if missing := sorted(set(parameters) - set(shapes)):
        raise CheckpointError(f"{folder} lacks {len(missing)} of the model's tensors, the first being {missing[0]!r}.")
    for name, parameter in parameters.items():
        if list(parameter.shape) != shapes[name]:
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes[name]}, the model expects {list(parameter.shape)}."
            )
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in set(tensors.keys()) & set(parameters):
                copy_whole(tensors.get_tensor(name), parameters[name])


def restore_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """:func:`load_tensors` from a checkpoint, which must hold these tensors and no others, none of a wider dtype.

    Raises:
        CheckpointError: as :func:`load_tensors`; other settings wrote the checkpoint.
    """
    dtypes = {name: dtype for file in folder.glob("*.safetensors") for name, _, dtype in _headers(file)}
    if unknown := sorted(dtypes.keys() - tensors.keys()):
        raise CheckpointError(
            f"{folder} holds {len(unknown)} tensors that the model does not have, the first being {unknown[0]!r}: it was written "
            "with another model or other lora_targets. Set those of the run."
        )
    for name, dtype in dtypes.items():
        saved, held = _DTYPES.get(dtype), tensors[name].dtype
        if saved is not None and torch.promote_types(saved, held) != held:
            raise CheckpointError(
                f"{folder}: {name} is {str(saved)[6:]}, and {str(held)[6:]} would round it. Set model_dtype to that of the run."
            )
    load_tensors(tensors, folder)


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point types by their names in safetensors files."""
_NO_MEANING = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Of a model's configuration, what its weights do not depend on."""


def require_same_config(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse weights of a model whose configuration, such as the number of heads or a base of frequencies, is another.

    Raises:
        CheckpointError: names what differs.
    """
    from transformers import AutoConfig

    saved = _meaning(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    ours = _meaning(config.to_dict())
    differing = [name for name in sorted(saved.keys() | ours.keys()) if saved.get(name) != ours.get(name)]
    if differing:
        found = ", ".join(f"{name} is {saved.get(name)!r:.60} (now {ours.get(name)!r:.60})" for name in differing[:4])
        raise CheckpointError(
            f"{folder} holds the weights of another model: {found}. Set model_path to that of the run."
        )


def _meaning(config: dict[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(config, default=str))
    return {
        name: _meaning(value) if isinstance(value, dict) else value
        for name, value in plain.items()
        if name not in _NO_MEANING
    }


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in the folder's files; none where there are no such files."""
    return {name for file in folder.glob("*.safetensors") for name, *_ in _headers(file)}


def _part_file(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}.safetensors"


def _parts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors by name, on the CPU, as many at a time as a file holds."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        part[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
        if size >= FILE_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _headers(file: Path) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and dtype of every tensor in a file."""
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # not a mapping
            tensor = tensors.get_slice(name)
            yield name, tensor.get_shape(), tensor.get_dtype()


HUB_TIMEOUT_S = 10.0
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configurations, tokenizer and chat template."""
WEIGHTS = ("*.safetensors", "*.bin")
"""Formats of weights; the second is fetched only where the first is missing."""
IGNORED = ("*/*", "consolidated*")
"""Copies of the weights in formats of other libraries."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(model_path: str) -> str:
    """The folder of a causal LM in Hugging Face format that ``model_path`` means, as an absolute path.

    A name that is no folder is taken for the name of a repository on the model hub and fetched into the hub's cache
    (``HF_HOME``); where the hub cannot be asked, what the cache holds is used.

    Raises:
        ConfigError: it is neither a model folder nor a repository that can be fetched.
    """
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        folder = _fetch(model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_path: {folder} holds no config.json; give a folder in Hugging Face format.")
    # Actors may have another working directory.
    return str(folder.absolute())


def config_file(model_path: str) -> Path:
    """``config.json`` of a model folder or of a repository on the model hub, without its weights.

    Raises:
        ConfigError: there is none.
    """
    from huggingface_hub import hf_hub_download

    file = Path(model_path).expanduser() / "config.json"
    if file.is_file():
        return file
    failure: Exception | None = None
    if _HUB_NAME.fullmatch(model_path):
        failure = _ask_hub(model_path)
        try:
            return Path(hf_hub_download(model_path, "config.json", local_files_only=failure is not None))
        except _hub_errors() as error:
            failure = failure or error
    hub = f", and the model hub gave none: {_line(failure)}" if failure else ""
    raise ConfigError(
        f"model_path: there is no folder {model_path!r} with a config.json{hub}. Give the model's folder."
    )


def _fetch(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model_path: there is no folder {name!r}, and it is not the name of a model on the hub.")
    failure = _ask_hub(name)
    try:
        for weights in WEIGHTS:
            folder = _snapshot(name, weights, cached=failure is not None)
            if any(folder.glob(weights)):
                return folder
    except _hub_errors() as error:
        raise ConfigError(
            f"model_path: there is no folder {name!r}, and the model hub gave none: {_line(failure or error)}. Where the "
            f"hub can be reached, run `hf download {name} --local-dir FOLDER`, then set model_path to that folder."
        ) from error
    raise ConfigError(
        f"model_path: {name!r} on the model hub holds no weights ({' or '.join(WEIGHTS)}); choose another model."
    )


def _ask_hub(name: str) -> Exception | None:
    """Why the hub does not offer the repository, if so: one request with a deadline, which a download would not have."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except _hub_errors() as error:
        return error
    return None


def _hub_errors() -> tuple[type[Exception], ...]:
    """Errors of the hub's client: it is not reachable, or offers no such model."""
    # The class of the hub's own HTTP library, which differs between its versions and is not declared as exported.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return OSError, ValueError, HTTPError


def _snapshot(name: str, weights: str, *, cached: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*FILES, weights]
    return Path(
        snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(IGNORED), local_files_only=cached)
    )


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].rstrip('.')}" if text else type(error).__name__
