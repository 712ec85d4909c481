"""Terminal output of a run, and the log file for Ray, engines and other libraries."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.algorithms.methods import method_of, method_title
from trial_ray.files import Numbers, visible
from trial_ray.metrics import COLUMNS, ENV_RUNNERS
from trial_ray.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.algorithms.grpo import GRPOConfig


def say(console: Console, line: str) -> None:
    """Print a line unchanged: text that looks like markup, for example in a path, is kept, and nothing is wrapped."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show(text: str) -> None:
    """Print plain text to standard output; text that looks like rich markup, such as part of a path, is not interpreted."""
    import rich

    say(rich.get_console(), text)


def print_overview(console: Console, config: GRPOConfig, stop: Numbers, folder: Path, log: Path | None) -> None:
    """Print an overview of the run, with one line per property.

    Args:
        console: console to print on.
        config: validated config.
        stop: stop criteria by metric.
        folder: the run's folder.
        log: file for the output of libraries; ``None`` if that output is shown on the terminal.
    """
    lines = {
        "method": method_title(method_of(config)),
        "tasks": _tasks(config),
        "policy": _policy(config),
        "actors": _actors(config),
        "runs on": _where(),
        "until": " or ".join(
            f"{value:g} iteration{'' if value == 1 else 's'}"
            if key == "training_iteration"
            else f"{key} reaches {value:g}"
            for key, value in stop.items()
        ),
        "run folder": str(folder),
    }
    if log:
        lines["log"] = f"{log} (output of Ray, the engines and other libraries)"
    for name, value in lines.items():
        say(console, f"{name:<11} {value}")


def _tasks(config: GRPOConfig) -> str:
    names = " + ".join(
        f"{entry.env_id} ({entry.config['split']})" if "split" in entry.config else entry.env_id
        for entry in config.environment_entries()
        if entry.weight
    )
    sampled = f"{config.tasks_per_iteration} tasks × {config.group_size} rollouts an iteration"
    evaluation_sets = config.evaluation_entries()
    held_out = f"; {config.evaluation_num_tasks} held-out tasks before and after" if evaluation_sets else ""
    return f"{names}, {sampled}{held_out}"


def _policy(config: GRPOConfig) -> str:
    if config.warm_start is None:
        return str(config.model_path)
    base = config.warm_start.get("model_path") or f"the {config.warm_start.get('size', 'tiny')} model"
    return f"{base}, warm-started by cloning a demonstrator"


def _actors(config: GRPOConfig) -> str:
    from trial_ray.config.sampling import actor_range

    def count(number: int | tuple[int, int], name: str, gpus: float = 0) -> str:
        minimum, maximum = actor_range(number)
        numbers = f"{minimum} to {maximum}" if maximum > minimum else f"{maximum}"
        share = f" ({gpus:g} GPU each)" if gpus else ""
        return f"{numbers} {name}{'' if maximum == 1 else 's'}{share}"

    runners = count(config.num_env_runners, "env runner")
    engines = count(config.num_engines, f"{config.engine} engine", config.num_gpus_per_engine)
    learners = count(config.num_learners, "learner", config.num_gpus_per_learner)
    return f"{runners}, {engines}, {learners if config.num_learners else 'the learner in this process'}"


def _where() -> str:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return f"the Ray cluster at {address}"
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"this machine: {cores} cores, {psutil.virtual_memory().total / 1e9:.0f} GB of memory"


def describe(metrics: Numbers) -> str:
    """Return one line of text with the metrics that ``COLUMNS`` lists; metrics that the method does not log are omitted."""
    return "  ".join(
        f"{heading} {form.format(metrics[key])}" for key, (heading, form) in COLUMNS.items() if key in metrics
    )


def unreadable_responses(metrics: Numbers) -> str | None:
    """Return a warning if at least half of the responses do not have the format that the prompt requires, else ``None``.

    Args:
        metrics: metrics of the first iteration, whose responses are from the untrained policy.
    """
    invalid = metrics.get(f"{ENV_RUNNERS}invalid_response_rate", 0.0)
    if invalid < 0.5:
        return None
    cut = metrics.get(f"{ENV_RUNNERS}cut_response_rate", 0.0)
    advice = (
        "raise max_response_tokens"
        if cut >= 0.5
        else "look at them with trial-ray inspect, or choose another prompt_style"
    )
    return f"{invalid:.0%} of the responses lack the required format, {cut:.0%} end at max_response_tokens: {advice}."


@contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """Show ``text`` with a spinner while the context runs; if ``console`` is not a terminal, show nothing."""
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    # Do not redirect stdout: rich would print the output of libraries above the spinner.
    with Live(
        Spinner("dots", Text(text)), console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ):
        yield


def duration(seconds: float) -> str:
    """Format seconds in a readable unit (s, min or h)."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def training_progress(
    console: Console, done: int = 0, total: int | None = None
) -> Iterator[Callable[[int, Numbers], None]]:
    """Print one line per iteration with the remaining time and, on a terminal, a progress bar below it.

    Args:
        console: console to print on.
        done: iterations that the run completed before it was resumed; 0 for a new run.
        total: total number of iterations; ``None`` if the run has another stop criterion.

    Yields:
        A function to call with the number and the metrics of each finished iteration.
    """
    began = last = time.monotonic()

    def show(number: int, metrics: Numbers) -> None:
        nonlocal last
        now = time.monotonic()
        of_total, left = "", ""
        if total:
            # Use the mean duration of all iterations of this command: durations differ, since some iterations save a checkpoint.
            seconds = (now - began) / (number - done) * (total - number)
            of_total, left = f"/{total}", f"about {duration(seconds)} left" if seconds > 0 else ""
        times = ", ".join(part for part in (f"{now - last:.1f} s", left) if part)
        say(console, f"iteration {number}{of_total}  {describe(metrics)}  ({times})")
        if number == 1 and (warning := unreadable_responses(metrics)):
            say(console, f"warning: {warning}")
        last = now
        update(number)

    with progress_bar("training", total, console.is_terminal, console) as update:
        update(done)
        yield show


# -- log of libraries -----------------------------------------------------------------------------------------

STDOUT, STDERR = 1, 2
LOG_FILE = Path("logs", "libraries.log")
"""Path of the log in the folder of a run or sweep."""


@contextmanager
def library_log(path: Path, console: Console) -> Iterator[None]:
    """Append stdout and stderr of this process and its children to a file; ``console`` prints as before.

    File descriptors are redirected instead of ``sys.stdout``, because Ray's C++ core and the processes that it starts write to
    the descriptors. Warnings of this package go to the console too. vLLM engines started inside the context log at INFO, unless
    the environment sets another level. An exception that ends the context gets a note with the path of the file, if it still
    exists.

    Args:
        path: the file; its folder is created if missing.
        console: console on the process's stdout. A console that prints elsewhere, for example in a test, is not changed.
    """
    from trial_ray.engines.settings import LOG_LEVEL  # The import is here, because engines.settings imports torch.

    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as restored:
        if LOG_LEVEL not in os.environ:
            os.environ[LOG_LEVEL] = "INFO"
            restored.callback(os.environ.pop, LOG_LEVEL, None)
        _flush()
        # Child processes do not inherit os.dup's copies: a daemon that outlives the command keeps no terminal or pipe open.
        terminal = {number: os.dup(number) for number in (STDOUT, STDERR)}
        for number, copy in terminal.items():
            restored.callback(os.close, copy)
            restored.callback(os.dup2, copy, number)
        restored.callback(_flush)
        if _is_on_stdout(console):
            restored.callback(setattr, console, "file", console.file)
            console.file = restored.enter_context(
                open(
                    terminal[STDOUT],
                    "w",
                    encoding=getattr(console.file, "encoding", None),
                    errors="replace",
                    closefd=False,
                )
            )
        warnings = _ConsoleHandler(console)
        logging.getLogger("trial_ray").addHandler(warnings)
        restored.callback(logging.getLogger("trial_ray").removeHandler, warnings)
        with open(path, "ab") as file:
            for number in terminal:
                os.dup2(file.fileno(), number)
        try:
            yield
        except Exception as error:
            if path.exists():
                error.add_note(f"output of Ray, the engines and other libraries: {path}")
            raise


class _ConsoleHandler(logging.Handler):
    """Logging handler that prints this package's warnings on the run's console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        from rich.markup import escape

        self._console.print(
            f"[yellow]warning:[/] {escape(visible(record.getMessage()))}", highlight=False, soft_wrap=True
        )


def _is_on_stdout(console: Console) -> bool:
    try:
        return console.file.fileno() == STDOUT
    except (OSError, ValueError, AttributeError):  # A console that writes into memory has no file descriptor.
        return False


def _flush() -> None:
    """Flush the buffers that Python and C have for stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOBase) and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
