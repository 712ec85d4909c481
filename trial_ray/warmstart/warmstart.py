"""The warm start: collects demonstrations, clones them until success reaches a target, caches and evaluates the model."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import rich
import torch
import transformers
from gymnasium.envs.registration import EnvSpec, load_env_creator

import trial_envs
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import EnvironmentEntry, make_entries
from trial_ray.errors import TrainingDivergedError
from trial_ray.files import (
    PACKAGE,
    Json,
    Numbers,
    checked_content,
    content_key,
    files_digest,
    finite,
    get_or_build,
    read_json,
    require_new_folder,
    write_folder,
    write_json,
)
from trial_ray.models.folders import write_model
from trial_ray.models.tensors import stored_tensors
from trial_ray.process import run_outside_event_loop
from trial_ray.progress import progress_bar
from trial_ray.warmstart.agreement import measure_agreement
from trial_ray.warmstart.cloning import Example, updates
from trial_ray.warmstart.demonstrations import collect, to_examples
from trial_ray.warmstart.policy import (
    RECORD,
    Policy,
    held_out_games,
    load_policy,
    make_demonstrator,
    model_files,
    set_threads,
    success_figures,
)
from trial_ray.warmstart.settings import CHECKED, WarmStartSettings

MIN_RESPONSE_ACCURACY = 0.3
"""Share of correct responses in training below which checks are skipped, because no game would be won."""

CODE = (
    "warmstart/*.py",
    "models/tiny.py",
    "models/model_shape.py",
    "engines/decoding.py",
    "engines/transformers.py",
    "models/layout.py",
    "objectives/allocation.py",
    "prompts/*.py",
    "rollout/episode.py",
    "adapters/*.py",
)
"""Code of this package that is part of the cache key, because it determines the result of a warm start."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmStartResult:
    """A warm-started model and its success.

    Attributes:
        path: folder with model and tokenizer in Hugging Face format, and ``warmstart.json``.
        success_rate: share of held-out games won, with responses sampled at temperature 1.
        episodes: number of held-out games, with one episode each.
        interval: 95 % Wilson interval of the success rate.
        invalid_share: share of held-out turns with an action that the environment did not understand.
        steps: number of updates.
        curve: one entry per check: ``step``, ``seconds`` since the start of cloning, ``success_rate``, ``invalid_share``.
        cached: True if the model was already in the cache.
        seconds: wall-clock time for making and evaluating the model, even if an earlier command did so.
        target_success: success rate at which cloning was to stop.
    """

    path: Path
    success_rate: float
    episodes: int
    interval: tuple[float, float]
    invalid_share: float
    steps: int
    curve: list[Numbers]
    cached: bool
    seconds: float
    target_success: float

    @property
    def overshot(self) -> bool:
        """Whether the success rate is far above the target, so that reinforcement learning has little left to learn."""
        return self.success_rate > _overshoot(self.target_success)

    def __str__(self) -> str:
        """Return a summary in one sentence."""
        low, high = self.interval
        advice = (
            f"; this is far above the target of {self.target_success:.0%}, which leaves little to learn: lower check_every"
            if self.overshot
            else ""
        )
        origin = "from the cache, made" if self.cached else "made"
        return (
            f"Warm start: {self.success_rate:.1%} [{low:.1%}, {high:.1%}] of {self.episodes} held-out games won "
            f"({origin} in {self.seconds:.0f} s with {self.steps} updates){advice}"
        )


def warm_start(
    settings: WarmStartSettings,
    adapters: Sequence[EnvironmentAdapter] = (),
    specs: Mapping[str, EnvSpec] | None = None,
    out: Path | None = None,
    progress: bool = True,
) -> WarmStartResult:
    """Clone an expert into a model; with unchanged settings and code, return the cached model.

    Args:
        settings: everything that determines the result, except for the environment's adapter.
        adapters: the user's environment adapters.
        specs: Gymnasium specs by environment id, for environments that are not registered in this process.
        out: new folder that the model is also copied to.
        progress: whether to show progress bars and a summary of the result.

    Raises:
        UserInputError: ``out`` is a file or is not empty.
        ConfigError: the environment is not registered, has no expert and lists no actions, or has too few tasks; or ``device``
            is ``cuda`` without a CUDA device.
        TrainingDivergedError: losses or weights of the model are not finite.
        CheckpointError: ``model_path`` does not contain a causal LM.
        ChatTemplateError: the tokenizer has no (usable) chat template.
        InfrastructureError: checks or the evaluation could not be played; a model that was already cloned stays in the cache.
        PromptTooLongError: a prompt in an episode of the expert exceeds the prompt limit.
    """
    if out is not None:
        require_new_folder(out)
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters, specs)
    key = cache_key(settings, entry)
    path, cached = get_or_build(
        "warmstart", key, lambda work: run_outside_event_loop(lambda: _make(settings, entry, key, work, progress))
    )
    record = _evaluated(settings, entry, path, progress)
    if out is not None:
        write_folder(out, lambda partial: shutil.copytree(path, partial))
    result = WarmStartResult(
        path=out or path,
        interval=tuple(record["interval"]),
        cached=cached,
        target_success=settings.target_success,
        **{name: record[name] for name in ("success_rate", "episodes", "invalid_share", "steps", "curve", "seconds")},
    )
    if result.overshot:
        _log.warning("%s.", result)
    if progress:
        rich.get_console().print(str(result), highlight=False)
    return result


def cache_key(settings: WarmStartSettings, entry: EnvironmentEntry) -> str:
    """Return the cache key of a warm start: settings, initial model, environment adapter, code and libraries.

    Raises:
        CheckpointError: ``model_path`` does not contain a model.
    """
    spec = entry.adapter.warm_start
    expert = spec.demonstrator
    code = [path for name in CODE for path in PACKAGE.glob(name)] + _environment_files(entry)
    model = None if settings.model_path is None else files_digest(model_files(Path(settings.model_path)))
    return content_key(
        {
            "settings": finite(asdict(settings), default=str),
            "adapter": entry.adapter.describe(),
            "demonstrator": type(make_demonstrator(entry)).__qualname__,
            "arguments": _named({**dict(enumerate(getattr(expert, "args", ()))), **getattr(expert, "keywords", {})}),
            "generated": repr(spec.generated and spec.generated(settings.generator_seed, settings.games)),
            "registered": [_named(entry.spec.kwargs), entry.spec.max_episode_steps],
            "vocabulary": list(spec.vocabulary),
            "interchangeable": [list(group) for group in spec.interchangeable],
            "model": model,
            "code": files_digest(code),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )


def _named(arguments: Mapping[Any, Any]) -> str:
    """Return arguments as text for the cache's key: functions and classes by name, others by ``repr``."""
    return repr({name: getattr(value, "__qualname__", value) for name, value in arguments.items()})


def _environment_files(entry: EnvironmentEntry) -> list[Path]:
    """Return the files with the environment's code: all of ``trial_envs``, and files of the user's classes and functions."""
    entry_point = entry.spec.entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    files = {*Path(str(trial_envs.__file__)).parent.rglob("*.py")}
    adapter, spec = entry.adapter, entry.adapter.warm_start
    arguments = [value for value in entry.spec.kwargs.values() if callable(value)]
    templates = map(type, adapter.templates.values())
    for part in (creator, spec.demonstrator, spec.generated, adapter.tools, adapter.success, *templates, *arguments):
        part = getattr(part, "func", part)
        members = (
            [value for base in part.__mro__ for value in vars(base).values()] if isinstance(part, type) else [part]
        )
        for function in members:
            if code := getattr(function, "__code__", None):
                files.add(Path(code.co_filename))
    return [path for path in files if path.is_file()]


def _make(settings: WarmStartSettings, entry: EnvironmentEntry, key: str, folder: Path, progress: bool) -> None:
    """Make the model, and write it and its record to ``folder``; the examples are cached under ``key`` before cloning."""
    import pandas

    started, file = time.perf_counter(), "examples.parquet"
    with set_threads(settings):
        policy = load_policy(settings, entry)
        with progress_bar("Demonstrated games", settings.games, progress) as on_game:
            cached, _ = get_or_build(
                "demonstrations",
                key,
                lambda work: pandas.DataFrame(to_examples(collect(policy, on_game), settings)).to_parquet(work / file),
            )
        with checked_content(cached / file):
            examples = [Example(*row) for row in pandas.read_parquet(cached / file).itertuples(index=False)]
        with progress_bar("Cloning updates", settings.max_steps, progress) as on_update:
            steps, curve = _clone(policy, examples, on_update)
    policy.model.to("cpu")  # type: ignore[arg-type]
    # vLLM reads the name of the model's class from the config; the config of a new model lacks it.
    policy.model.config.architectures = [type(policy.model).__name__]
    write_model(policy.model, stored_tensors(policy.model).items(), folder)
    policy.tokenizer.save_pretrained(folder)
    record = {
        "settings": finite(asdict(settings), default=str),
        "steps": steps,
        "examples": len(examples),
        "curve": curve,
        "seconds": time.perf_counter() - started,
    }
    write_json(folder / RECORD, record)


def _evaluated(settings: WarmStartSettings, entry: EnvironmentEntry, folder: Path, progress: bool) -> Json:
    """Return the record in ``folder``; if it has no evaluation yet, evaluate the model and add the results."""
    record = read_json(folder / RECORD)
    if "agreement" in record:
        return record
    started = time.perf_counter()
    if progress:
        rich.get_console().print(f"Evaluating on {settings.evaluation_games} games never seen before …")
    try:
        agreement = measure_agreement(replace(settings, model_path=str(folder)), entry)
    except BaseException:
        _log.warning(
            "The cloned model is complete in %s, but its success was not measured; a warm start with the same settings measures it "
            "there.",
            folder,
        )
        raise
    record |= {
        **success_figures(agreement.trajectories),
        "agreement": agreement.figures,
        "seconds": record["seconds"] + time.perf_counter() - started,
    }
    write_json(folder / RECORD, record)
    return record


def _overshoot(target: float) -> float:
    """Return the success rate above which ``target`` counts as far exceeded: halfway between ``target`` and 1."""
    return (target + 1) / 2


def _early_check(settings: WarmStartSettings, curve: Sequence[Numbers]) -> int:
    """Return the update after which to check early; 0 if the next regular check is soon enough.

    An early check is made if the success rate, rising twice as fast as between the last two checks, would be far above the
    target at the next regular check. It is made when the success rate, rising as fast as between the last two checks, would
    reach the target, but at least ``check_every // 10`` updates (and at least one) after the last check.
    """
    step, success = int(curve[-1]["step"]), curve[-1]["success_rate"]
    before = (curve[-2]["step"], curve[-2]["success_rate"]) if len(curve) > 1 else (step - settings.check_every, 0.0)
    gain = (success - before[1]) / (step - before[0])
    left = settings.check_every - step % settings.check_every
    if success + 2 * gain * left <= _overshoot(settings.target_success):
        return 0
    return step + max(1, settings.check_every // 10, math.ceil((settings.target_success - success) / gain))


def _clone(policy: Policy, examples: list[Example], on_update: Callable[..., None]) -> tuple[int, list[Numbers]]:
    """Train until a check reaches the target, or for ``max_steps`` updates; return the number of updates and all checks.

    Raises:
        TrainingDivergedError: the loss, or the weights at a check, are not finite.
    """
    settings, started, success = policy.settings, time.perf_counter(), ""
    curve: list[Numbers] = []
    accuracies: list[float] = []
    early = 0
    with held_out_games(policy, CHECKED) as games:
        for step, (loss, right) in zip(range(1, settings.max_steps + 1), updates(policy, examples), strict=False):
            accuracies.append(right)
            on_update(step, f"loss {loss:.2f}{success}")
            due = step % settings.check_every == 0 or step == early
            due = due and fmean(accuracies[-25:]) >= MIN_RESPONSE_ACCURACY
            due = due or step == settings.max_steps
            if not math.isfinite(loss) or (
                due and not all(bool(parameter.isfinite().all()) for parameter in policy.model.parameters())
            ):
                raise TrainingDivergedError(
                    f"The warm start's loss or weights are not finite after update {step} (loss {loss:g}), so the model is not "
                    "kept. Lower learning_rate, or matrix_learning_rate with the optimizer muon."
                )
            if not due:
                continue
            figures = success_figures(games.play())
            rate, seconds = figures["success_rate"], round(time.perf_counter() - started, 2)
            curve.append(
                {"step": step, "seconds": seconds, "success_rate": rate, "invalid_share": figures["invalid_share"]}
            )
            success = f" · held-out success {rate:.0%} (stops at {settings.target_success:.0%})"
            on_update(step, f"loss {loss:.2f}{success}", line=True)
            if rate >= settings.target_success:
                return step, curve
            early = _early_check(settings, curve)
    _log.warning(
        "Cloning ended after %d updates with %.0f %% of the last check's games won, below the target of %.0f %%; raise max_steps "
        "or games, or choose easier games.",
        settings.max_steps,
        100 * curve[-1]["success_rate"],
        100 * settings.target_success,
    )
    return settings.max_steps, curve
