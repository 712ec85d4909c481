"""Default values of an engine's settings, and checks of its arguments."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import fields
from pathlib import Path

from trial_ray.engines.protocol import is_whole
from trial_ray.errors import ConfigError
from trial_ray.files import Record
from trial_ray.models.model_shape import max_positions

DTYPES = ("float32", "bfloat16", "float16")

_IDS = "requests and responses are token ids, and the engine needs no tokenizer"
_SAMPLING = "it would change the distribution that requests ask for"
_BITS = "the engine must have exactly the weights that the learner sent, which a checksum confirms"
_ONE_MODEL = "an engine is one copy of the model on tensor_parallel_size GPUs; set num_engines for more"

NO_SLEEP = (
    "An engine that shares its device must be able to sleep, and vLLM's sleep mode needs CUDA. Give each engine a GPU "
    "(num_gpus_per_engine), or set engine='transformers'."
)

NO_BATCH_INVARIANCE = (
    "batch_invariant=True needs GPUs of compute capability 8.0 or higher (A100, H100 and later). Give "
    "each engine such a GPU (num_gpus_per_engine), or leave batch_invariant out of engine_kwargs."
)

RESERVED = {
    "model": "the engine starts from the policy's folder; set model_path in .rl_module()",
    "model_weights": "the engine starts from the policy's folder; set model_path in .rl_module()",
    "skip_tokenizer_init": _IDS,
    "tokenizer": _IDS,
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logits_processors": _SAMPLING,
    "logprobs_mode": "log-probabilities must come from the distribution that was sampled",
    "worker_cls": "the worker receives the learner's weights",
    "worker_extension_cls": "the worker receives the learner's weights",
    "quantization": _BITS,
    "quantization_config": _BITS,
    "pipeline_parallel_size": _ONE_MODEL,
    "data_parallel_size": _ONE_MODEL,
    "distributed_executor_backend": "it follows from tensor_parallel_size",
    "hf_token": "the engine loads a local folder and contacts no hub; set HF_TOKEN in the environment",
    "trust_remote_code": "code in a model folder is never run; the learner supports the architectures of transformers",
    "weight_transfer_config": "set weight_transfer in .engines()",
}
"""Fields of vLLM's ``EngineArgs`` that the user cannot set, with the reason."""

PREFILL_TOKENS = 8192
"""Maximum number of tokens, padding included, in one forward pass over prompts (a single prompt may be longer)."""
MAX_ROWS = 256
"""Default maximum batch size. This many rows keep any device busy; more rows would only slow down each response."""
MEMORY_SHARE = 0.5
"""Share of the memory left after loading the model that the transformers engine uses for its key-value cache; the rest is for
prefill and sampling."""
SLACK = 4
"""When the transformers engine's key-value cache is enlarged, ``1 / SLACK`` of the needed columns (16 or more) are added on either
side."""
VLLM_CPU_ROWS = 64
"""Default number of requests that vLLM decodes at a time on the CPU."""
VLLM_CPU_CACHE_GIB = 0.5
"""Default size of vLLM's key-value cache on the CPU, in GiB."""
GPU_MEMORY_UTILIZATION = 0.9
"""Default share of a GPU's memory that vLLM uses."""

LOG_LEVEL = "VLLM_LOGGING_LEVEL"
"""Environment variable with the level of vLLM's log."""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

ALIASES = {"max_num_seqs": "max_batch", "kv_cache_memory_bytes": "kv_cache_gib"}
"""Arguments of the engine class by the equivalent field of vLLM's ``EngineArgs``; users may set only one of the two."""

COUNTS = {"max_model_len": False, "max_batch": True, "num_threads": True, "tensor_parallel_size": False}
"""Arguments that must be whole numbers of at least 1; those with the value ``True`` here may also be ``None``, so that the
engine chooses the number."""


def engine_dtype(dtype: str | None, *, on_gpu: bool) -> str:
    """Return the torch name of an engine's weight type: ``dtype`` if given, otherwise the default of the device.

    Raises:
        ConfigError: engines do not support ``dtype``.
    """
    if dtype is None:
        return "bfloat16" if on_gpu else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"engine_kwargs: expected dtype as one of {', '.join(DTYPES)}, got {dtype!r}.")
    return dtype


def check_engine_arguments(engine: str, engine_class: type, arguments: Record) -> None:
    """Reject arguments that the engine does not accept.

    Args:
        engine: name of the engine, for error messages.
        engine_class: actor class of the engine; ``**`` arguments of its constructor, if any, are fields of vLLM's ``EngineArgs``.
        arguments: arguments set by the user.

    Raises:
        ConfigError: an argument is unknown (the message suggests the nearest known name), cannot be set by the user, or is out of
            range.
    """
    accepted = inspect.getfullargspec(engine_class)
    known = set(accepted.kwonlyargs)
    further = [name for name in arguments if name not in known]
    if further and accepted.varkw:
        from vllm import EngineArgs  # Import vLLM only if needed: it takes ten seconds.

        known |= {field.name for field in fields(EngineArgs)} - RESERVED.keys()
    for name in further:
        if name in RESERVED and engine == "vllm":
            raise ConfigError(f"engine_kwargs: {name!r} cannot be set: {RESERVED[name]}.")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else f" It takes {', '.join(sorted(known))}."
            raise ConfigError(f"engine_kwargs: the {engine} engine has no argument {name!r}.{hint}")
        if ALIASES.get(name) in arguments:
            raise ConfigError(
                f"engine_kwargs: {name!r} and {ALIASES[name]!r} set the same option; leave one of them out."
            )
    for name, may_be_none in COUNTS.items():
        value = arguments.get(name, 1)
        if not (may_be_none if value is None else is_whole(value) and value >= 1):
            raise ConfigError(f"engine_kwargs: expected {name} as a whole number of at least 1, got {value!r}.")
    if (seed := arguments.get("seed")) is not None and not is_whole(seed):
        raise ConfigError(f"engine_kwargs: expected seed as a whole number or None, got {seed!r}.")
    engine_dtype(arguments.get("dtype"), on_gpu=False)
    if (level := arguments.get("log_level")) not in (None, *LOG_LEVELS):
        raise ConfigError(f"engine_kwargs: expected log_level as one of {', '.join(LOG_LEVELS)}, got {level!r}.")


def check_device(arguments: Record, num_gpus: float) -> None:
    """Reject vLLM's arguments that need a device which the engine does not have.

    Args:
        arguments: arguments of the engine's constructor.
        num_gpus: GPUs of the engine.

    Raises:
        ConfigError: an argument needs a GPU, or more GPUs than the engine has.
    """
    if (workers := arguments.get("tensor_parallel_size", 1)) > max(1, num_gpus):
        raise ConfigError(
            f"engine_kwargs: tensor_parallel_size is {workers}, but an engine has {num_gpus:g} GPUs; set "
            f"num_gpus_per_engine={workers}."
        )
    if num_gpus:
        return
    if arguments.get("enable_sleep_mode"):
        raise ConfigError(NO_SLEEP)
    if arguments.get("batch_invariant"):
        raise ConfigError(NO_BATCH_INVARIANCE)
    if arguments.get("enable_chunked_prefill"):
        raise ConfigError(
            "engine_kwargs: expected enable_chunked_prefill=False, because vLLM's CPU kernels cannot combine it with seeds."
        )


def check_positions(model_path: str, max_model_len: int) -> None:
    """Reject a ``max_model_len`` above the model's number of positions, beyond which models fail or generate nonsense.

    Args:
        model_path: folder of the model; if this machine cannot read it, the check is left to the engine that loads the model.
        max_model_len: maximum number of tokens of prompt and response together.

    Raises:
        ConfigError: ``max_model_len`` is too large; the message contains both numbers.
    """
    if not (Path(model_path) / "config.json").is_file():
        return
    from transformers import AutoConfig

    positions = max_positions(AutoConfig.from_pretrained(model_path, trust_remote_code=False))
    if positions is not None and max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model in {model_path} has {positions} positions. Lower "
            "max_prompt_tokens or max_response_tokens (or max_outcome_tokens, which a teacher context adds, or max_model_len in "
            "engine_kwargs), or choose another model."
        )
