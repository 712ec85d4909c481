"""The learner's update against that of TRL's ``GRPOTrainer`` on the same rows, model, loss, precision and threads, in one run.

    python benchmarks/bench_trl.py --json benchmarks/results/trl.json

TRL (pinned in ``requirements/bench.txt``) runs in a separate environment, ``.venv-bench`` (``make bench-setup``), as a process
that reads the quickstart's rows with old log-probabilities and advantages, and calls ``training_step`` on them; it generates
nothing. The loss is the token mean over a minibatch of the clipped surrogate (``loss_type="dapo"``; ``microbatch_rows`` as large as
``minibatch_rows`` here), without a KL term, and both must give the same gradient. TRL runs with the fastest of several values of
``per_device_train_batch_size``, and without gradient checkpointing, its default. Each process waits while the other one works.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from learners import BenchLearner, Update, relative_difference
from measure import Measure, interleaved, report_parser, seconds_note, speedup, write_report
from rollouts import quickstart_config, quickstart_groups

WORKER = Path(__file__).with_name("trl_worker.py")
PYTHON = WORKER.parents[1] / ".venv-bench" / "bin" / "python"
BATCH_SIZES = (16, 32, 64)
ROUNDS = 3


class TRL:
    """A process with a trainer of TRL (``trl_worker.py``), which ends with the context.

    Args:
        python: Python interpreter of the environment with TRL.
        method: ``"grpo"`` or ``"sft"``.
        rows: training rows.
        model_path: folder of the policy.

    Attributes:
        folder: folder for the files that are exchanged with the process.
        threads: number of threads of PyTorch in the process.
    """

    def __init__(self, python: Path, method: str, rows: Any, model_path: str) -> None:
        if not python.is_file():
            raise SystemExit(f"{python} is missing; make the environment with TRL: make bench-setup")
        self._temporary = TemporaryDirectory(prefix="bench_trl-")
        self.folder = Path(self._temporary.name)
        file = self.folder / "rows.pickle"
        file.write_bytes(pickle.dumps(rows))
        command = [str(python), str(WORKER), method, str(file), model_path]
        settings = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}
        )
        self.threads = self._answer()["threads"]

    def ask(self, line: str) -> dict[str, Any]:
        """Send a command to the worker, and return the answer."""
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def seconds(self, *settings: object) -> float:
        """Return the seconds of a run with these settings: the padding, only of ``grpo``, and the batch size."""
        return float(self.ask(" ".join(map(str, ("run", *settings))))["seconds"])

    def __enter__(self) -> TRL:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._temporary.cleanup()

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


def compare(python: Path) -> tuple[list[Measure], dict[str, Any]]:
    model_path, groups = quickstart_groups()
    config = quickstart_config().rl_module(model_path=model_path)
    learner = BenchLearner(config.training(microbatch_rows=config.minibatch_rows))
    ours = learner.update(groups, keep_gradients=True)
    with TRL(python, "grpo", minibatches(ours), model_path) as trl:
        agreement = agrees(ours, trl)
        best = {}
        for padding in ("generation", "sorted"):
            tried = {size: trl.seconds(padding, size) for size in BATCH_SIZES}
            best[padding] = min(tried, key=tried.__getitem__)
        contestants = {
            "learner": lambda: learner.update(groups).seconds,
            "TRL": lambda: trl.seconds("generation", best["generation"]),
            "TRL, sorted": lambda: trl.seconds("sorted", best["sorted"]),
        }
        times = interleaved(contestants, ROUNDS)
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


def agrees(ours: Update, trl: TRL) -> Measure:
    file = trl.folder / "gradients.pt"
    trl.ask(f"gradient sorted 64 {file}")
    theirs = torch.load(file, weights_only=True)
    pairs = list(zip(ours.gradients, theirs, strict=True))
    difference = max(relative_difference(found, each["gradient"]) for found, each in pairs)
    losses = max(abs(loss - each["loss"]) for loss, each in zip(ours.losses, theirs, strict=True))
    return Measure(
        "quickstart: difference of gradients to TRL's, relative",
        difference,
        "",
        1e-5,
        "lower",
        note=f"the worst of {len(pairs)} minibatches; losses differ by {losses:.1e} at most",
    )


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of the environment with TRL")
    args = parser.parse_args()
    write_report(args.json, *compare(args.python))


if __name__ == "__main__":
    main()
