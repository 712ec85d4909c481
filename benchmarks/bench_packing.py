"""Scoring both views as one packed sequence against two plain passes over the same rows, in one run.

    python benchmarks/bench_packing.py --json benchmarks/results/packing.json

A random Qwen3 of the quickstart's size; rows of about 90 prompt, 5 response and 15 evidence tokens. Leaves out: long prompts, GPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trial_ray.learner.packing import Row, score_rows

MAX_TOKENS = 4096


def make_rows(count: int, rng: np.random.Generator) -> list[Row]:
    def ids(mean: float, spread: float, least: int) -> np.ndarray:
        return rng.integers(0, 500, max(least, round(rng.normal(mean, spread)))).astype(np.int32)

    rows = []
    for _ in range(count):
        prompt = ids(90, 15, 10)
        rows.append(Row(prompt, len(prompt) - 3, ids(5, 2, 1), ids(15, 5, 0)))
    return rows


def seconds(function, repeats: int) -> tuple[float, object]:
    result = function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=500,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            tie_word_embeddings=True,
        )
    ).eval()
    rows = make_rows(args.rows, np.random.default_rng(0))
    hindsight_rows = [row.hindsight_row for row in rows]

    def packed():
        return score_rows(lm, rows, two_views=True, max_tokens=MAX_TOKENS)

    def plain():
        return [score_rows(lm, each, two_views=False, max_tokens=MAX_TOKENS)[0] for each in (rows, hindsight_rows)]

    packed_s, packed_scores = seconds(packed, args.repeats)
    plain_s, plain_scores = seconds(plain, args.repeats)
    difference = max((one - other).abs().max().item() for one, other in zip(packed_scores, plain_scores, strict=True))
    result = {
        "rows": args.rows,
        "threads": torch.get_num_threads(),
        "packed_seconds": packed_s,
        "two_plain_passes_seconds": plain_s,
        "speedup": plain_s / packed_s,
        "tokens_packed": sum(row.two_view_length for row in rows),
        "tokens_plain": sum(row.length for row in (*rows, *hindsight_rows)),
        "largest_difference_nats": difference,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
