"""Commands that read a run folder: ``report``, ``inspect``, ``export`` and ``replay``."""

from __future__ import annotations

import os
import sys
import webbrowser
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli.console import (
    ENV_ADAPTER,
    METHOD,
    SET,
    TRUST,
    command,
    errors,
    flag,
    option,
    output,
    positive,
    print_table,
    readable,
)
from trial_ray.errors import UserInputError
from trial_ray.files import visible, write_text
from trial_ray.runs.checkpoints import export_model
from trial_ray.runs.terminal import say, show

if TYPE_CHECKING:
    from trial_ray.runs.reader import RecordedRun
    from trial_ray.runs.replay import ReplayedUpdate


@command(
    "one HTML page about the learning and cost of runs",
    """examples:
  trial-ray report runs/my-run                              writes runs/my-run/report.html
  trial-ray report runs/trial-0 runs/trial-1 runs/grpo-0 runs/grpo-1 --out comparison.html
  trial-ray report runs/my-sweep                            one curve a trial
  trial-ray report runs/my-run --figures figures            the charts as PNG and SVG as well

RUN is the folder of a run or of a sweep. Runs that differ only by seed are shown as one curve with an interval; others are
compared, paired by seed and task. The page loads nothing: it can be sent, and opened without a network.
`train` and `sweep` leave such a page in their folders.
""",
    option("runs", "folder of a run or of a sweep, or a run's URI", "RUN", readable(0), nargs="+"),
    option("--out", "the page (default: report.html in the folder, here with several)", "FILE", Path),
    option("--figures", "also write every chart as PNG and SVG into DIR", "DIR", Path),
)
def report(args: Namespace) -> None:
    """Write one HTML page about runs."""
    from trial_ray.reports.page import REPORT_FILE, load_groups, report_page
    from trial_ray.reports.plots import write_figures

    groups = load_groups(args.runs)
    runs = [run for group in groups for run in group.runs]
    single = len(args.runs) == 1
    title = args.runs[0].resolve().name if single else f"{len(runs)} runs"
    for run in runs:
        for reason in run.reasons():
            show(f"missing: {run.name}: {reason}")
    page = write_text(args.out or (args.runs[0] if single else Path()) / REPORT_FILE, report_page(groups, title))
    for path in [*(write_figures(groups, args.figures) if args.figures else ()), page]:
        show(f"written: {path} ({path.stat().st_size:,} bytes)")


@command(
    "read the trajectories of a run",
    """examples:
  trial-ray inspect runs/my-run                              write the page RUN/viewer/index.html
  trial-ray inspect runs/my-run --open                       and open it
  trial-ray inspect runs/grpo runs/trial --out compared      two runs, side by side on the same tasks
  trial-ray inspect runs/my-run --text --iteration 3         list the trajectories of an iteration in the terminal
  trial-ray inspect runs/my-run --text --iteration 3 --show 7    print its trajectory number 7 with its prompts

The page needs no server and no network. The records are Parquet for pandas, DuckDB and datasets (docs/runs.md#reading-them).
""",
    option("run_folders", "run folder or URI; two to compare them", "RUN", readable(1), nargs="+"),
    option("--iteration", "only this one (default: all; with --text the newest)", "N", positive),
    option("--out", "folder of the page (default: viewer in the first RUN)", "DIR", Path),
    flag("--open", "open the page in a browser, if there is a display"),
    flag("--text", "list the trajectories of an iteration in the terminal instead"),
    option("--show", "with --text: print trajectory number K of the iteration", "K", positive),
    ENV_ADAPTER,
)
def inspect(args: Namespace) -> None:
    """Write a page with the recorded trajectories of a run, or print them."""
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.runs.reader import open_run

    folders, text = args.run_folders, args.text
    if len(folders) > (1 if text else 2):
        expected = "one RUN with --text" if text else "one or two RUN folders"
        raise UserInputError(f"Expected {expected}, got {len(folders)}.")
    if args.show and not text:
        raise UserInputError("--show K prints a trajectory in the terminal; give --text with it.")
    if text and (args.out or args.open):
        raise UserInputError(
            "--text prints in the terminal; --out and --open belong to the page. Give one or the other."
        )
    adapters, names = load_adapters(args.env_adapters), [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    runs = [open_run(folder, name, args.iteration, adapters) for folder, name in zip(folders, names, strict=True)]
    notes = [f"{run.name}: {reason}" for run in runs for reason in run.reasons("config", "tokens")]
    if text:
        _print(runs[0], args.show)
    else:
        from rich.progress import Progress

        from trial_ray.reports.viewer import write_viewer

        target = (args.out or folders[0] / "viewer").resolve()
        with Progress(console=errors(), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("iterations", total=sum(len(run.recorded) for run in runs))
            written = write_viewer(runs, target, notes, lambda: progress.advance(task))
        show(visible(f"{written.trajectories:,} trajectories: {written.page}"))
        notes = written.notes
        display = sys.platform in ("darwin", "win32") or not {"DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ)
        if args.open and not (display and webbrowser.open(written.page.as_uri())):
            notes.append("there is no display here; copy the folder to a machine with a display.")
    for note in notes:
        say(errors(), visible(f"note: {note}"))


def _print(run: RecordedRun, number: int | None) -> None:
    from trial_ray.reports.viewer import list_trajectories, print_trajectory

    (iteration,) = run.recorded[-1:]
    recorded = run.read(iteration)
    if number is None:
        output().print(list_trajectories(recorded, f"iteration {iteration}"))
    elif number > len(recorded):
        raise UserInputError(f"Iteration {iteration} has {len(recorded)} trajectories; got --show {number}.")
    else:
        output().print(print_trajectory(recorded[number - 1], run.tokens), soft_wrap=True)


@command(
    "copy the model out of a checkpoint, in Hugging Face format",
    """examples:
  trial-ray export runs/my-run exported/agent
  trial-ray export runs/my-run/checkpoints/000020 exported/agent
  trial-ray export runs/my-lora-run exported/adapter --adapter
  trial-ray export recorded --messages messages.jsonl       recorded episodes as chat messages

DIR then loads with transformers (AutoModelForCausalLM.from_pretrained) and serves with vLLM (vllm serve DIR
--generation-config vllm). If a run trained an adapter (lora_rank), it is merged into the weights; --adapter copies only the
adapter, for peft.
--messages writes the recorded episodes of a run, or of `evaluate --record DIR`, with one JSON object per conversation, which
Hugging Face datasets and TRL's SFTTrainer read.
""",
    option(
        "checkpoint",
        "a checkpoint, or a run folder (its newest), or the URI of one; with --messages a folder with recorded episodes",
        "CHECKPOINT",
        readable(1),
    ),
    option("folder", "a new folder", "DIR", Path, nargs="?"),
    flag("--adapter", "copy only the adapter, in the format of peft"),
    option("--messages", "write recorded episodes as chat messages instead", "FILE.jsonl", Path),
    ENV_ADAPTER,
)
def export(args: Namespace) -> None:
    """Copy the Hugging Face model out of a checkpoint, or write recorded episodes as messages."""
    if (args.folder is None) == (args.messages is None):
        raise UserInputError(
            "Name either the new folder of the model, DIR, or a file for recorded episodes, --messages FILE."
        )
    if args.messages is not None:
        from trial_ray.adapters.registry import load_adapters
        from trial_ray.sft.messages import write_messages

        number = write_messages(args.checkpoint, args.messages, load_adapters(args.env_adapters))
        show(f"{number:,} conversations: {args.messages}")
        return
    target = export_model(args.checkpoint, args.folder, adapter=args.adapter)
    show(f"{'adapter' if args.adapter else 'model'}: {target}")


@command(
    "repeat an update from its recorded rollouts, also with another method",
    """examples:
  trial-ray replay runs/my-run --iteration 1                         the same update: same weights, same metrics
  trial-ray replay runs/my-run --iteration 1 --method grpo           GRPO's update from the same rollouts
  trial-ray replay runs/my-run --iteration 1 --set hindsight_coeff=0.1 --set hindsight_start_iteration=1
  trial-ray replay runs/my-run --iteration 1 --set training_folder=replayed     and record each turn's weights there

An update starts from the checkpoint of the iteration before it; the first one starts from the initial model. `train` keeps the
newest two checkpoints, one every 10 iterations: to replay any iteration, train with --checkpoint-every 1 --keep-checkpoints N.
With nothing changed, the weights are the same bit for bit on the CPU that made them. Neither environments nor engines start, and
the run folder is only read.
""",
    option("run_folder", "run folder or URI", "RUN", readable(None)),
    option("--iteration", "iteration to replay", "K", positive, required=True),
    METHOD,
    ENV_ADAPTER,
    TRUST,
    SET,
)
def replay(args: Namespace) -> None:
    """Repeat an update of a run from its recorded rollouts."""
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.runs.folder import RunFolder
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.runs.replay import Replay

    folder, adapters = RunFolder.reopen(args.run_folder), load_adapters(args.env_adapters)
    update = Replay.of(folder, args.iteration, args.method, args.overrides, adapters, trust=args.trust)
    with ray_session(args.verbose):
        replayed = update.play()
    _print_metrics(replayed)
    verdict = "the same weights, bit for bit" if replayed.same_weights else "other weights"
    if not (replayed.same_weights or update.changed):
        verdict += ": sums were rounded differently, on another device or with another number of threads"
    show(f"weights before: {replayed.record.weights_before}")
    show(f"weights after:  {replayed.record.weights_after} (run)")
    show(f"                {replayed.weights} (replay): {verdict}")


def _print_metrics(update: ReplayedUpdate) -> None:
    """Print a table with one row per metric: the value of the run, the value of the replay, and the difference."""
    rows = []
    for name in sorted({*update.recorded_metrics, *update.metrics}):
        recorded, replayed = update.recorded_metrics.get(name), update.metrics.get(name)
        difference = "" if replayed is None or recorded is None else f"{replayed - recorded:.3g}"
        rows.append((name, *("" if value is None else f"{value:.6g}" for value in (recorded, replayed)), difference))
    title = f"iteration {update.record.iteration}: {len(update.record.group_ids)} groups of rollouts"
    print_table(title, ("metric", ">run", ">replay", ">difference"), rows)
