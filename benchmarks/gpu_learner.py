"""The learner on a GPU: model FLOPs utilisation, and its numbers against float32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_models import QWEN3, SMOLLM2, Setup
from learners import BenchLearner, Update, input_ids, relative_difference
from measure import Measure
from transformers import AutoModelForCausalLM, PretrainedConfig

from trial_ray import TRIALConfig
from trial_ray.learner.packing import Row
from trial_ray.models.prefix_tree import PrefixOrder

FORWARD_TOKENS = 16_384


def trial_config(setup: Setup, model_path: str, compute_dtype: str) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path=model_path, compute_dtype=compute_dtype)
        .training(
            kl_coeff=0.0,
            entropy_coeff=0.0,
            minibatch_rows=256,
            microbatch_rows=32,
            max_tokens_per_forward=FORWARD_TOKENS,
            max_logprob_gap=1e9,  # no engine sampled the rows
        )
        .learners(num_learners=0, num_gpus_per_learner=1 if setup.cuda else 0)
    )


# ---- utilisation ----


def learner(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """Forward and backward passes of an update in bfloat16."""
    peak = setup.matmul_rate()
    measures, details = [], {"matmul_flops": peak}
    for name, tasks in ((SMOLLM2, 8), (QWEN3, 4)):
        with tempfile.TemporaryDirectory() as folder:
            path = setup.save_model(Path(folder), name)
            found, details[name] = utilisation(setup, name, path, 1 if setup.small else tasks, peak)
        measures += found
    return measures, details


def utilisation(
    setup: Setup, name: str, model_path: str, tasks: int, peak: float
) -> tuple[list[Measure], dict[str, Any]]:
    bench = BenchLearner(trial_config(setup, model_path, "bfloat16"))
    groups = setup.groups(bench.lm.config.vocab_size, tasks, turns=2 if setup.small else 8)
    found: list[Update] = []
    seconds_of_all = setup.seconds(lambda: found.append(bench.update(groups)), repeats=3)
    update = min(found, key=lambda each: each.seconds)
    rows = update.rows.model_rows(range(len(update.rows)))
    forwarded, in_rows = sum(update.tokens), sum(map(len, input_ids(rows, two_views=False)))
    flops = tree_flops(bench.lm.config, update, rows)
    plain = row_flops(bench.lm.config, rows)
    memory = torch.cuda.max_memory_allocated() / 1e9 if setup.cuda else 0.0
    times = f"{update.seconds:.2f} s for {forwarded:,} tokens forwarded of {in_rows:,} in rows"
    measures = [
        Measure(
            f"{name}: utilisation of the learner's passes",
            100 * flops / update.seconds / peak,
            "%",
            40,
            note=f"{times}; of {peak / 1e12:.0f} TFLOP/s of a matrix product, peak memory {memory:.1f} GB",
        ),
        Measure(
            f"{name}: the same if each row were computed by itself",
            100 * plain / update.seconds / peak,
            "%",
            note="what the utilisation of a learner without trees is comparable with",
        ),
    ]
    details = {"seconds": update.seconds, "update_seconds": seconds_of_all, "tokens": forwarded, "flops": flops}
    return measures, {**details, "tokens_in_rows": in_rows, "peak_memory_gb": memory}


def layer_flops(config: PretrainedConfig, tokens: int, keys: int, targets: int) -> float:
    """Operations of forward and backward passes (6 a weight and token): matrix products, attention to ``keys``, output head."""
    hidden, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    weights = 2 * hidden * heads * size + 2 * hidden * kv_heads * size + 3 * hidden * config.intermediate_size
    layers = config.num_hidden_layers * (6 * weights * tokens + 12 * heads * size * keys)
    return float(layers + 6 * hidden * config.vocab_size * targets)


def tree_flops(config: PretrainedConfig, update: Update, rows: list[Row]) -> float:
    """Of the distinct prefixes of each minibatch; a token attends to as many keys as it is deep."""
    total = 0.0
    for step in update.plan.steps:
        chosen = [rows[row].sequence for each in step for row in each.rows]
        order = PrefixOrder(chosen)
        keys = sum(
            (length * (length + 1) - shared * (shared + 1)) // 2
            for length, shared in zip(order.lengths.tolist(), order.shared.tolist(), strict=True)
        )
        targets = sum(sequence.num_targets for sequence in chosen)
        total += layer_flops(config, order.num_distinct, keys, targets)
    return total


def row_flops(config: PretrainedConfig, rows: list[Row]) -> float:
    lengths = [len(each) for each in input_ids(rows, two_views=False)]
    keys = sum(length * (length + 1) // 2 for length in lengths)
    return layer_flops(config, sum(lengths), keys, sum(len(row.response_ids) for row in rows))


# ---- numbers ----


def numerics(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """Log-probabilities and gradient of an update against one row at a time in float32, SmolLM2-135M's shape."""
    torch.backends.cuda.matmul.allow_tf32 = False
    measures = []
    with tempfile.TemporaryDirectory() as folder:
        path = setup.save_model(Path(folder), SMOLLM2)
        groups = setup.groups(setup.model_config(SMOLLM2).vocab_size, tasks=1, turns=2 if setup.small else 4)
        exact = BenchLearner(trial_config(setup, path, "float32")).update(groups, keep_gradients=True)
        low = BenchLearner(trial_config(setup, path, "bfloat16")).update(groups, keep_gradients=True)
        logprobs, gradient = one_row_at_a_time(setup, path, exact)
    limits = {"float32": (1e-4, 1e-4), "bfloat16": (0.1, 0.1)}
    for name, update in (("float32", exact), ("bfloat16", low)):
        gap = float((update.rows.logprobs - logprobs).abs().mean())
        difference = relative_difference(update.gradients[0], gradient)
        most_gap, most_difference = limits[name]
        measures += [
            Measure(f"{name} trees: mean gap of log-probabilities", gap, "nats", most_gap, "lower"),
            Measure(f"{name} trees: difference of the gradient, relative", difference, "", most_difference, "lower"),
        ]
    return measures, {"tokens": len(logprobs), "rows": len(exact.rows)}


def one_row_at_a_time(setup: Setup, model_path: str, update: Update) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of all rows, and the first minibatch's gradient; on policy the surrogate's is that of -A log π."""
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(setup.device)
    table, step = update.rows, update.plan.steps[0]
    weight = {int(row): each.weight / len(table.token_positions(each.rows)) for each in step for row in each.rows}
    found = []
    for index, turn in enumerate(table.turns):
        ids = torch.tensor([[*turn.prompt_ids, *turn.response_ids]], device=setup.device).long()
        hidden = lm.get_decoder()(ids[:, :-1], use_cache=False).last_hidden_state[0, len(turn.prompt_ids) - 1 :]
        targets = ids[0, len(turn.prompt_ids) :]
        logprobs = torch.log_softmax(lm.get_output_embeddings()(hidden), -1).gather(-1, targets[:, None])[:, 0]
        found.append(logprobs.detach().cpu())
        if index in weight:
            (-float(table.advantages[index]) * weight[index] * logprobs.sum()).backward()
    return torch.cat(found), {name: each.grad for name, each in lm.named_parameters()}
