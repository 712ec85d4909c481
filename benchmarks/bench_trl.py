"""The learner's update against that of TRL's ``GRPOTrainer`` on the same rows, model, loss, precision and threads, in one run.

    python benchmarks/bench_trl.py --json benchmarks/results/trl.json

TRL (pinned in ``requirements/bench.txt``) runs in a separate environment, ``.venv-bench`` (``make bench-setup``), as a process
that reads the quickstart's rows with old log-probabilities and advantages, and calls ``training_step`` on them; it generates
nothing. The loss is the token mean over a minibatch of the clipped surrogate (``loss_type="dapo"``; ``microbatch_rows`` as large as
``minibatch_rows`` here), without a KL term, and both must give the same gradient. TRL runs with the fastest of several values of
``per_device_train_batch_size``, and without gradient checkpointing, its default. Each process waits while the other one works.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learners import BenchLearner, Update, relative_difference
from measure import Measure, interleaved, seconds_note, speedup, write_report
from quickstart_rows import quickstart_config, quickstart_groups

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".venv-bench" / "bin" / "python"
BATCH_SIZES = (16, 32, 64)
ROUNDS = 3


class TRL:
    """A process with a trainer of TRL.

    Args:
        python: Python interpreter of the environment with TRL.
        worker: name of the worker script in the folder of this script.
        rows: file with the training rows.
        model_path: folder of the policy.
    """

    def __init__(self, python: Path, worker: str, rows: Path, model_path: str) -> None:
        if not python.is_file():
            raise SystemExit(f"{python} is missing; make the environment with TRL: make bench-setup")
        command = [str(python), str(HERE / worker), str(rows), model_path]
        settings = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}
        )
        self.threads = self._answer()["threads"]

    def ask(self, line: str) -> dict[str, Any]:
        """Send a command to the worker, and return the answer."""
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def run(self, padding: str, batch_size: int) -> float:
        """Return the seconds of forward and backward passes of all minibatches."""
        return float(self.ask(f"run {padding} {batch_size}")["seconds"])

    def gradients(self, padding: str, batch_size: int, folder: Path) -> list[dict[str, Any]]:
        """Return loss and gradient of each minibatch."""
        file = folder / "gradients.pt"
        self.ask(f"gradient {padding} {batch_size} {file}")
        kept: list[dict[str, Any]] = torch.load(file, weights_only=True)
        return kept

    def stop(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("The process with TRL ended; what it printed stands above. Run: make bench-setup")
        return json.loads(line)


def minibatches(update: Update) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray, float]]]:
    table = update.rows
    advantages = table.advantages.tolist()

    def row(index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        turn = table.turns[index]
        return (
            turn.prompt_ids,
            turn.response_ids,
            table.logprobs[table.token_positions([index])].numpy(),
            advantages[index],
        )

    return [[row(index) for each in step for index in each.rows] for step in update.plan.steps]


def compare(python: Path, folder: Path) -> tuple[list[Measure], dict[str, Any]]:
    quickstart = quickstart_groups()
    config = quickstart_config().rl_module(model_path=quickstart.model_path)
    learner = BenchLearner(config.training(microbatch_rows=config.minibatch_rows))
    ours = learner.update(quickstart.groups, keep_gradients=True)
    rows = folder / "rows.pickle"
    rows.write_bytes(pickle.dumps(minibatches(ours)))
    trl = TRL(python, "trl_worker.py", rows, quickstart.model_path)
    try:
        agreement = agrees(ours, trl.gradients("sorted", 64, folder))
        best = {}
        for padding in ("generation", "sorted"):
            tried = {size: trl.run(padding, size) for size in BATCH_SIZES}
            best[padding] = min(tried, key=tried.__getitem__)
        contestants = {
            "learner": lambda: learner.update(quickstart.groups).seconds,
            "TRL": lambda: trl.run("generation", best["generation"]),
            "TRL, sorted": lambda: trl.run("sorted", best["sorted"]),
        }
        times = interleaved(contestants, ROUNDS)
    finally:
        trl.stop()
    note = f"{seconds_note(times)}; per_device_train_batch_size {best['generation']}, float32, {trl.threads} threads"
    measures = [
        Measure("quickstart: update against TRL's", speedup(times, "learner", "TRL"), target=1.5, note=note),
        Measure(
            "quickstart: update against TRL's, its rows sorted by length",
            speedup(times, "learner", "TRL, sorted"),
            note=f"which TRL does not do; per_device_train_batch_size {best['sorted']}",
        ),
        agreement,
    ]
    return measures, {"batch_sizes": best, "seconds": times, "threads": trl.threads, "rows": len(ours.rows)}


def agrees(ours: Update, theirs: list[dict[str, Any]]) -> Measure:
    pairs = list(zip(ours.gradients, theirs, strict=True))
    difference = max(relative_difference(found, each["gradient"]) for found, each in pairs)
    losses = max(abs(loss - each["loss"]) for loss, each in zip(ours.losses, theirs, strict=True))
    return Measure(
        "quickstart: difference of gradients to TRL's, relative",
        difference,
        unit="",
        target=1e-5,
        better="lower",
        note=f"the worst of {len(pairs)} minibatches; losses differ by {losses:.1e} at most",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", type=Path, default=PYTHON, help="of the environment with TRL")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_trl-") as folder:
        measures, details = compare(args.python, Path(folder))
    write_report(args.json, measures, details)


if __name__ == "__main__":
    main()
