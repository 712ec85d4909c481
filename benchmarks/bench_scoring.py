"""Peak memory of scoring against the number of rows: it must not grow with them.

    python benchmarks/bench_scoring.py --json benchmarks/results/scoring.json

Each number of rows in a process of its own: log-probabilities pack by pack, as the learner takes them, and out of the hidden states
of all packs together. Resident memory of the process, on the CPU; rows have nothing in common.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from measure import Measure, write_report

ROWS = 32
MULTIPLES = (1, 4, 16)
ROW_TOKENS, TARGETS, PASS_TOKENS = 256, 192, 2048
WAYS = ("pack by pack", "all packs together")
SHAPE = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def measure(rows: int, way: str) -> int:
    """Peak memory of this process, which scores."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trial_ray.models import tree_attention
    from trial_ray.models.logprobs import gather_logprobs, hidden_states, sequence_logprobs
    from trial_ray.models.prefix_tree import PrefixOrder, ScoredSequence, pack_trees

    torch.manual_seed(0)
    lm = Qwen3ForCausalLM(Qwen3Config(**SHAPE, attn_implementation=tree_attention.register())).eval()
    rng = np.random.default_rng(0)

    def packed(number: int):
        ids = rng.integers(10, SHAPE["vocab_size"], (number, ROW_TOKENS))
        return pack_trees(PrefixOrder([ScoredSequence(row, TARGETS) for row in ids]), PASS_TOKENS, multiple_of=64)

    with torch.no_grad():
        sequence_logprobs(
            lm, packed(PASS_TOKENS // ROW_TOKENS)
        )  # one pass: what every number of rows needs is in the peak
        sequences = packed(rows)
        if way == WAYS[0]:
            sequence_logprobs(lm, sequences)
        else:
            states = torch.cat([states for states, _ in hidden_states(lm, sequences)])
            gather_logprobs(states[sequences.tokens], lm.get_output_embeddings(), sequences.targets[sequences.tokens])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("ROWS", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(int(args.measure[0]), args.measure[1])))
        return
    found = {way: {} for way in WAYS}
    for way in WAYS:
        for multiple in MULTIPLES:
            command = [sys.executable, __file__, "--measure", str(ROWS * multiple), way]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
            found[way][ROWS * multiple] = json.loads(printed.splitlines()[-1])
    measures = [
        Measure(
            f"peak memory of scoring {ROWS * MULTIPLES[-1]} rows over that of {ROWS}, {way}",
            found[way][ROWS * MULTIPLES[-1]] / found[way][ROWS],
            "x",
            1.1 if way == WAYS[0] else None,
            "lower",
            note=", ".join(f"{rows} rows {peak / 2**20:,.0f} MiB" for rows, peak in found[way].items()),
        )
        for way in WAYS
    ]
    write_report(args.json, measures, {"peak_bytes": found, "tokens_of_a_row": ROW_TOKENS, "targets_of_a_row": TARGETS})


if __name__ == "__main__":
    main()
