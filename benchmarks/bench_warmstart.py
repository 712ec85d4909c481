"""The warm start's updates: the optimizer's share of their time, against torch's Muon, and what a prefix tree could save.

python benchmarks/bench_warmstart.py
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/bench_warmstart.py  # as without bfloat16 units
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from measure import Measure, write_report
from torch.optim.lr_scheduler import LambdaLR

from trial_ray.environments.registry import make_entries
from trial_ray.models.packaged import alfworld_tiny
from trial_ray.warmstart.cloning import Batch, Cloner, cloning_loss, learning_rate_scale
from trial_ray.warmstart.demonstrations import collect, to_examples
from trial_ray.warmstart.policy import load_policy, prompt_builder, recorded_settings
from trial_ray.warmstart.settings import WarmStartSettings

GAMES = 60
UPDATES = 60
UNTIMED = 10


def use_torchs_muon(cloner: Cloner, settings: WarmStartSettings) -> None:
    """Replace Muon by torch's own, which iterates in bfloat16, with the same schedule."""
    matrices = cloner._optimizers[0].param_groups[0]["params"]
    muon = torch.optim.Muon(matrices, lr=settings.matrix_learning_rate, momentum=0.95, weight_decay=0.0)
    cloner._optimizers[0] = muon
    cloner._schedulers[0] = LambdaLR(muon, partial(learning_rate_scale, steps=settings.max_steps))


def timed_updates(cloner: Cloner) -> dict[str, float]:
    """Median seconds of an update and of the optimizers' part of it, and the share of tokens that no other row begins with."""
    whole, optimizers, distinct = [], [], []
    for index in range(UPDATES):
        batch = next(cloner._batches)
        began = time.perf_counter()
        loss, _ = cloning_loss(cloner._model, batch, cloner._prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(cloner._model.parameters(), 1.0)
        computed = time.perf_counter()
        for optimizer, scheduler in zip(cloner._optimizers, cloner._schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        ended = time.perf_counter()
        distinct.append(distinct_share(batch))
        if index >= UNTIMED:
            whole.append(ended - began)
            optimizers.append(ended - computed)
    return {
        "update_s": statistics.median(whole),
        "optimizer_s": statistics.median(optimizers),
        "distinct": statistics.mean(distinct),
    }


def distinct_share(batch: Batch) -> float:
    """Nodes of the prefix tree of a batch's rows over the positions that are computed, padding included."""
    rows = [row[held].tolist() for row, held in zip(batch.ids, batch.response | batch.prompt, strict=True)]
    nodes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    return len(nodes) / batch.ids.numel()


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(2)
    settings = replace(recorded_settings(alfworld_tiny()), games=GAMES)
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)])
    _, tokenizer = load_policy(settings, entry)
    examples = to_examples(
        collect(settings, entry, tokenizer, prompt_builder(settings, entry, tokenizer)),
        settings.hindsight_fraction,
        settings.hindsight_wasted_share,
        settings.seed,
    )
    found, digests = {}, {}
    for name in ("ours", "torch"):
        model, _ = load_policy(settings, entry)
        cloner = Cloner(model, tokenizer, examples, entry.adapter.warm_start.interchangeable, settings)
        if name == "torch":
            use_torchs_muon(cloner, settings)
        found[name] = timed_updates(cloner)
        digests[name] = digest(model)
    ours, torchs = found["ours"], found["torch"]
    units = torch.backends.cpu.get_cpu_capability()
    measures = [
        Measure(
            f"optimizer's share of a cloning update, {units}",
            ours["optimizer_s"] / ours["update_s"],
            "",
            0.2,
            "lower",
            f"{1e3 * ours['optimizer_s']:.1f} of {1e3 * ours['update_s']:.1f} ms",
        ),
        Measure(
            f"the same with torch's Muon, {units}",
            torchs["optimizer_s"] / torchs["update_s"],
            "",
            note=f"{1e3 * torchs['optimizer_s']:.1f} of {1e3 * torchs['update_s']:.1f} ms",
        ),
        Measure(
            "positions of a cloning batch that a prefix tree would compute",
            ours["distinct"],
            "",
            note="of those of padded rows",
        ),
    ]
    write_report(args.json, measures, {"times": found, "weights_after_updates": digests, "updates": UPDATES})


if __name__ == "__main__":
    main()
