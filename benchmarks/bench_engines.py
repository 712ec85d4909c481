"""Requests per second of the inference engines, through the pool and client that rollouts use.

    python benchmarks/bench_engines.py --engines transformers vllm --json benchmarks/results/engines.json

A random Qwen3 of the quickstart's size answers short agent turns: prompts of 100 tokens of which the first half repeats
within a group of 8, responses of 4 tokens, 64 requests at a time. CPU seconds are reported next to wall-clock seconds,
which depend on other work of the machine. CUDA, several engines and long responses are not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import numpy as np
import psutil
import torch
from measure import Measure, cpu_seconds, ray_cluster, report_parser, seconds_of, write_report

from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.weights import pack_weights

VOCAB_SIZE = 500


def make_model(folder: str):
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=7,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[7])
    model.save_pretrained(folder)
    return model


def make_prompts(args: argparse.Namespace, rng: np.random.Generator) -> list[np.ndarray]:
    half = args.prompt_tokens // 2
    prompts = []
    for _ in range(args.requests // 8):
        shared = rng.integers(10, VOCAB_SIZE, half)
        own = rng.integers(10, VOCAB_SIZE, (8, args.prompt_tokens - half))
        prompts += [np.concatenate([shared, tail]).astype(np.int32) for tail in own]
    return prompts


async def serve(client: EngineClient, prompts: list[np.ndarray], args: argparse.Namespace) -> int:
    slots = asyncio.Semaphore(args.concurrency)

    async def one(index: int, prompt: np.ndarray) -> int:
        async with slots:
            response = await client.generate(
                prompt, SamplingParams(max_tokens=args.response_tokens, seed=index), index // 8
            )
            return len(response.response_ids)

    return sum(await asyncio.gather(*[one(index, prompt) for index, prompt in enumerate(prompts)]))


def measure(engine: str, folder: str, model: torch.nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    pool = EnginePool(
        engine=engine,
        model_path=folder,
        num_engines=1,
        engine_kwargs={"max_model_len": 512, "max_batch": args.concurrency, "num_threads": args.threads},
        num_cpus_per_engine=1,
    )
    try:
        [info] = pool.start()
        start_s = time.perf_counter() - began
        process = psutil.Process(info["pid"])
        start_cpu_s = cpu_seconds(process)
        sync_s = seconds_of(lambda: pool.sync(pack_weights(model.named_parameters(), 0)))
        client = EngineClient(pool.handles)
        rng = np.random.default_rng(0)
        first_s = seconds_of(lambda: asyncio.run(serve(client, make_prompts(args, rng)[:8], args)))
        rounds, engine_cpu, client_cpu = [], cpu_seconds(process), time.process_time()
        for _ in range(args.rounds):
            prompts = make_prompts(args, rng)
            began = time.perf_counter()
            tokens = asyncio.run(serve(client, prompts, args))
            seconds = time.perf_counter() - began
            rounds.append((len(prompts) / seconds, tokens / seconds))
        engine_cpu, client_cpu = cpu_seconds(process) - engine_cpu, time.process_time() - client_cpu
        requests_per_s, tokens_per_s = np.median(rounds, axis=0)
        served = args.rounds * len(prompts)
    finally:
        pool.stop()
    return {
        "engine": engine,
        "start_s": round(start_s, 2),
        "sync_s": round(sync_s, 4),
        "first_8_requests_s": round(first_s, 2),
        "requests_per_s": round(float(requests_per_s), 1),
        "response_tokens_per_s": round(float(tokens_per_s), 1),
        "start_cpu_s": round(start_cpu_s, 1),
        "engine_cpu_ms_per_request": round(1e3 * engine_cpu / served, 2),
        "client_cpu_ms_per_request": round(1e3 * client_cpu / served, 2),
    }


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--response-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the engine")
    args = parser.parse_args()
    with ray_cluster(2) as folder:
        model = make_model(f"{folder}/model")
        results = [measure(engine, f"{folder}/model", model, args) for engine in args.engines]
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    write_report(args.json, measures(results), {"settings": settings, "results": results})


def measures(results: list[dict[str, Any]]) -> list[Measure]:
    """Return the measures for the table of all benchmarks."""
    return [
        Measure(
            f"engine {each['engine']}: requests a second",
            each["requests_per_s"],
            "1/s",
            note=f"engine {each['engine_cpu_ms_per_request']} CPU ms a request, start {each['start_s']} s",
        )
        for each in results
    ]


if __name__ == "__main__":
    main()
