"""The warm start: collect demonstrations, clone them until held-out success reaches the target, cache, evaluate."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import rich
import torch
import transformers
from gymnasium.envs.registration import EnvSpec, load_env_creator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel

import trial_envs
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.registry import EnvironmentEntry, make_entries
from trial_ray.errors import TrainingDivergedError
from trial_ray.files import (
    PACKAGE,
    content_key,
    files_digest,
    get_or_build,
    read_json,
    require_new_folder,
    write_folder,
    write_json,
)
from trial_ray.rollout.env_runner import outside_loop
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.warmstart.cloning import Cloner, Example
from trial_ray.warmstart.demonstrations import collect, kept_examples, make_demonstrator, to_examples
from trial_ray.warmstart.judgement import judge_policy
from trial_ray.warmstart.policy import (
    RECORD,
    HeldOutGames,
    computing_with,
    load_policy,
    model_files,
    prompt_builder,
)
from trial_ray.warmstart.settings import CHECKED, WarmStartSettings

LEAST_RESPONSE_ACCURACY = 0.3
"""Below this share of right responses in training no game is won, and a check would only cost time."""

CODE = (
    "warmstart/*.py",
    "models/tiny.py",
    "models/vocabulary.py",
    "engines/local.py",
    "engines/transformers.py",
    "learner/packing.py",
    "objectives/allocation.py",
    "rollout/chat_template.py",
    "rollout/prompts.py",
    "rollout/response_texts.py",
    "rollout/hindsight.py",
    "rollout/episode.py",
    "environments/*.py",
)
"""The code, beside the environment's, that decides what a warm start leads to."""

_log = logging.getLogger(__name__)


LINE_EVERY = 100
"""Updates between lines of a log, where no bar can move."""


class WarmStartProgress(Progress):
    """A progress bar a stage: games played by the oracle, updates; in a log, lines."""

    def __init__(self, settings: WarmStartSettings, enabled: bool) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            disable=not enabled,
            # What libraries print goes where stdout goes, which may be a file; rich would draw it above the bars.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._success = ""  # what the last check found
        self.collecting = self.add_task("Demonstrations (games)", total=settings.games, state="")
        self._cloning = self.add_task("Cloning (updates)", total=settings.max_steps, start=False, state="")

    def updated(self, step: int, steps: int, loss: float) -> None:
        """An update was done."""
        if step == 1:
            self.start_task(self._cloning)
        state = f"loss {loss:.2f}{self._success}"
        self.update(self._cloning, completed=step, state=state)
        if step % LINE_EVERY == 0:
            self._print_line(f"update {step} of {steps}, {state}")

    def checked(self, step: int, success: float, target: float) -> None:
        """Held-out games were played."""
        found = f"held-out success {success:.0%} (stops at {target:.0%})"
        self._success = f" · {found}"
        self._print_line(f"update {step}, {found}")

    def _print_line(self, line: str) -> None:
        if not (self.disable or self.console.is_terminal):
            self.console.print(f"Cloning: {line}", highlight=False)


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """A warm-started model and how well it does.

    Attributes:
        path: folder of model and tokenizer in Hugging Face format, with ``warmstart.json`` beside them.
        success_rate: share of held-out games won, responses sampled at temperature 1.
        episodes: held-out games played, one episode each.
        interval: 95 % Wilson interval of the success rate.
        invalid_share: share of held-out turns whose action the environment did not understand.
        steps: updates done.
        curve: one entry a check: ``step``, ``seconds`` since cloning began, ``success_rate``, ``invalid_share``.
        cached: whether the model was there already.
        seconds: wall-clock time that making the model took, whenever that was.
    """

    path: Path
    success_rate: float
    episodes: int
    interval: tuple[float, float]
    invalid_share: float
    steps: int
    curve: list[dict[str, float]]
    cached: bool
    seconds: float

    def __str__(self) -> str:
        """One sentence for people."""
        low, high = self.interval
        origin = "from the cache, made" if self.cached else "made"
        return (
            f"Warm start: {self.success_rate:.1%} [{low:.1%}, {high:.1%}] of {self.episodes} held-out games won "
            f"({origin} in {self.seconds:.0f} s with {self.steps} updates)"
        )


def warm_start(
    settings: WarmStartSettings,
    adapters: Sequence[EnvironmentAdapter] = (),
    specs: Mapping[str, EnvSpec] | None = None,
    out: Path | None = None,
    progress: bool = True,
) -> WarmStartResult:
    """Clone a demonstrator into a model; the same settings and code give the cached model at once.

    Args:
        settings: everything that decides the result, but the environment's adapter.
        adapters: the user's.
        specs: what Gymnasium knows under environment ids, where they are not registered in this process.
        out: copy the model to this new folder too.
        progress: show progress bars, and the result in a sentence.

    Raises:
        UserInputError: ``out`` is a file or is not empty.
        ConfigError: the environment is not registered, nothing demonstrates, or there are too few tasks; ``device`` is
            ``cuda`` where there is none.
        TrainingDivergedError: losses or weights of the model are not finite.
        CheckpointError: ``model_path`` holds no causal LM.
        ChatTemplateError: its tokenizer has no (usable) chat template.
        InfrastructureError: checks or the evaluation could not be played; a model that was cloned by then stays in the cache.
        PromptTooLongError: a prompt of the demonstrator does not fit.
    """
    if out is not None:
        require_new_folder(out)
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters, specs)
    key = cache_key(settings, entry)
    path, cached = get_or_build(
        "warmstart", key, lambda work: outside_loop(lambda: _make(settings, entry, key, work, progress))
    )
    outside_loop(lambda: _judge(settings, entry, path, progress))
    if out is not None:
        write_folder(out, lambda partial: shutil.copytree(path, partial))
    record = read_json(path / RECORD)
    found = {name: record[name] for name in ("success_rate", "episodes", "invalid_share", "steps", "curve", "seconds")}
    result = WarmStartResult(path=out or path, interval=tuple(record["interval"]), cached=cached, **found)
    if progress:
        rich.get_console().print(str(result), highlight=False)
    return result


def cache_key(settings: WarmStartSettings, entry: EnvironmentEntry) -> str:
    """Key of what ``settings`` lead to: the settings, the model they start from, the adapter, the code and the libraries.

    Raises:
        CheckpointError: ``model_path`` holds no model.
    """
    code = [path for name in CODE for path in PACKAGE.glob(name)] + _environment_files(entry)
    model = None if settings.model_path is None else files_digest(model_files(Path(settings.model_path)))
    return content_key(
        {
            "settings": settings.to_dict(),
            "adapter": entry.adapter.describe(),
            "demonstrator": type(make_demonstrator(entry)).__qualname__,
            "vocabulary": list(entry.adapter.warm_start.vocabulary),
            "interchangeable": [list(group) for group in entry.adapter.warm_start.interchangeable],
            "model": model,
            "code": files_digest(code),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )


def _environment_files(entry: EnvironmentEntry) -> list[Path]:
    """The code of an environment and its demonstrator: whole packages of ``trial_envs``, else the files of the classes."""
    entry_point = entry.spec.entry_point
    parts = [
        load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point,
        entry.adapter.warm_start.demonstrator,
    ]
    files = {file for part in parts if part is not None for file in _source_files(part)}
    packages = Path(str(trial_envs.__file__)).parent
    found: set[Path] = set()
    for file in files:
        found |= {*file.parent.glob("*.py"), *packages.glob("core/*.py")} if packages in file.parents else {file}
    return sorted(found)


def _source_files(part: Any) -> set[Path]:
    functions = [part, *vars(part).values()] if isinstance(part, type) else [part]
    names = {function.__code__.co_filename for function in functions if hasattr(function, "__code__")}
    return {path.resolve() for path in map(Path, names) if path.is_file()}


def _make(settings: WarmStartSettings, entry: EnvironmentEntry, key: str, folder: Path, progress: bool) -> None:
    """Make the model and write it, with its record, to ``folder``; its examples are kept under ``key`` as soon as they are made."""
    started = time.perf_counter()
    with computing_with(settings), WarmStartProgress(settings, progress) as shown:
        model, tokenizer = load_policy(settings, entry)
        builder = prompt_builder(settings, entry, tokenizer)
        examples = kept_examples(
            key,
            lambda: to_examples(
                collect(settings, entry, tokenizer, builder, lambda: shown.advance(shown.collecting)),
                settings.hindsight_fraction,
                settings.hindsight_wasted_share,
                settings.seed,
            ),
        )
        shown.update(shown.collecting, completed=settings.games)  # also where an earlier warm start played them
        steps, curve = _clone(settings, entry, model, tokenizer, builder, examples, shown)
    model.to("cpu")  # type: ignore[arg-type]
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    record = {
        "settings": settings.to_dict(),
        "steps": steps,
        "examples": len(examples),
        "curve": curve,
        "seconds": time.perf_counter() - started,
    }
    write_json(folder / RECORD, record)


def _judge(settings: WarmStartSettings, entry: EnvironmentEntry, folder: Path, progress: bool) -> None:
    """Add to the record in ``folder`` how well the model there does, where it does not say so yet."""
    record = read_json(folder / RECORD)
    if "judgement" in record:
        return
    started = time.perf_counter()
    if progress:
        rich.get_console().print(f"Evaluating on {settings.evaluation_games} games never seen before …")
    try:
        judgement = judge_policy(replace(settings, model_path=str(folder)), entry)
    except BaseException:
        _log.warning(
            "The cloned model is complete in %s, but how well it does was not measured; a warm start with the same settings "
            "measures it there.",
            folder,
        )
        raise
    result = judgement.result
    record |= {
        "success_rate": result.success_rate,
        "episodes": result.episodes,
        "interval": result.interval,
        "invalid_share": result.invalid_share,
        "judgement": judgement.figures,
        "seconds": record["seconds"] + time.perf_counter() - started,
    }
    write_json(folder / RECORD, record)


def _clone(
    settings: WarmStartSettings,
    entry: EnvironmentEntry,
    model: PreTrainedModel,
    tokenizer: Any,
    builder: PromptBuilder,
    examples: list[Example],
    shown: WarmStartProgress,
) -> tuple[int, list[dict[str, float]]]:
    """Update until a check reaches the target; return the updates done and the curve of the checks.

    Raises:
        TrainingDivergedError: the loss, or weights that a check would play with, are not finite.
    """
    cloner = Cloner(model, tokenizer, examples, entry.adapter.warm_start.interchangeable, settings)
    started, curve, accuracies = time.perf_counter(), [], []
    with HeldOutGames(settings, entry, CHECKED, tokenizer, builder) as games:
        for step in range(1, settings.max_steps + 1):
            loss, right = cloner.step()
            accuracies.append(right)
            shown.updated(step, settings.max_steps, loss)
            due = step % settings.check_every == 0 and fmean(accuracies[-25:]) >= LEAST_RESPONSE_ACCURACY
            due = due or step == settings.max_steps
            if not math.isfinite(loss) or (due and not all(bool(each.isfinite().all()) for each in model.parameters())):
                raise TrainingDivergedError(
                    f"The warm start's loss or weights are not finite after update {step} (loss {loss:g}), so the model is not "
                    "kept. Lower learning_rate, or matrix_learning_rate with the optimizer muon."
                )
            if not due:
                continue
            result = games.play(model, settings.seed)
            curve.append(
                {
                    "step": step,
                    "seconds": round(time.perf_counter() - started, 2),
                    "success_rate": result.success_rate,
                    "invalid_share": result.invalid_share,
                }
            )
            shown.checked(step, result.success_rate, settings.target_success)
            if result.success_rate >= settings.target_success:
                return step, curve
    _log.warning(
        "Cloning ended after %d updates with %.0f %% of the last check's games won, below the target of %.0f %%; raise max_steps "
        "or games, or choose easier games.",
        settings.max_steps,
        100 * curve[-1]["success_rate"],
        100 * settings.target_success,
    )
    return settings.max_steps, curve
