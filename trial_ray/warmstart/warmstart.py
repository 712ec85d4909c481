"""The warm start: collect demonstrations, clone them until held-out success reaches the target, evaluate, cache."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import trial_envs
import trial_ray
from trial_ray.errors import ChatTemplateError, CheckpointError, ConfigError
from trial_ray.models.tiny import build_tiny_model
from trial_ray.models.tokenizer import build_tokenizer
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.warmstart.cache import content_key, files_digest, get_or_build
from trial_ray.warmstart.cloning import Cloner, Example, Renaming, Schedule
from trial_ray.warmstart.demonstrations import collect, collect_texts, demonstrator_package, to_examples
from trial_ray.warmstart.evaluation import HeldOutGames, PlayResult
from trial_ray.warmstart.progress import WarmStartProgress
from trial_ray.warmstart.renaming import Renamer
from trial_ray.warmstart.settings import WarmStartSettings

RECORD = "warmstart.json"
CHECKED_GAMES, EVALUATED_GAMES = 1, 2
"""Added to ``generator_seed``: no game of one purpose serves another."""
LEAST_RESPONSE_ACCURACY = 0.3
"""Below this share of right responses in training no game is won, and a check would only cost time."""

CODE = (
    "warmstart/*.py",
    "models/tiny.py",
    "models/tokenizer.py",
    "hindsight/*.py",
    "rollout/prompts.py",
    "rollout/templates.py",
)
"""The code, beside the environment's, that decides what a warm start leads to."""

_log = logging.getLogger(__name__)


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
    curve: tuple[dict[str, float], ...]
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


def warm_start(settings: WarmStartSettings, out: Path | None = None, progress: bool = True) -> WarmStartResult:
    """Clone an oracle that explores into a model; the same settings and code give the cached model at once.

    Args:
        settings: everything that decides the result.
        out: copy the model here too; must not hold anything yet.
        progress: show progress bars, and the result in a sentence.

    Raises:
        ConfigError: no oracle for the environment, or ``out`` is not empty.
        CheckpointError: ``model_path`` holds no causal LM.
        ChatTemplateError: its tokenizer has no (usable) chat template.
    """
    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another folder for the warm-started model, or empty it.")
    path, cached = get_or_build("warmstart", cache_key(settings), lambda work: _make(settings, work, progress))
    if out is not None:
        shutil.copytree(path, out, dirs_exist_ok=True)
    record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    result = WarmStartResult(
        path=out or path,
        success_rate=record["success_rate"],
        episodes=record["episodes"],
        interval=(record["interval"][0], record["interval"][1]),
        invalid_share=record["invalid_share"],
        steps=record["steps"],
        curve=tuple(record["curve"]),
        cached=cached,
        seconds=record["seconds"],
    )
    if progress:
        Console().print(str(result), highlight=False)
    return result


def cache_key(settings: WarmStartSettings) -> str:
    """Key of what ``settings`` lead to: the settings, the model they start from, the code and the libraries.

    Raises:
        ConfigError: no oracle is known for the environment.
        CheckpointError: ``model_path`` holds no model.
    """
    patterns = {trial_ray: CODE, trial_envs: ("core/*.py", f"{demonstrator_package(settings.env)}/*.py")}
    code = [
        path
        for package, names in patterns.items()
        for name in names
        for path in Path(str(package.__file__)).parent.glob(name)
    ]
    model = None if settings.model_path is None else files_digest(_model_files(Path(settings.model_path)))
    return content_key(
        {
            "settings": settings.to_dict(),
            "model": model,
            "code": files_digest(code),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )


def _model_files(folder: Path) -> list[Path]:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model: config.json is missing. Give a folder in Hugging Face format.")
    return [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model")]


def load_policy(settings: WarmStartSettings) -> tuple[PreTrainedModel, Any]:
    """The model to clone into, in float32, and its tokenizer.

    Raises:
        CheckpointError: ``model_path`` holds no causal LM with a tokenizer.
        ChatTemplateError: the tokenizer has no chat template or no end token.
    """
    if settings.model_path is None:
        # The words of ALFWorld's grammar are part of every vocabulary.
        texts = () if settings.env == "trial/ALFWorld-v0" else collect_texts(settings)
        tokenizer = build_tokenizer(texts)
        return build_tiny_model(tokenizer, settings.size, settings.seed), tokenizer
    _model_files(Path(settings.model_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
        model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{settings.model_path} holds no causal LM that transformers can load: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ChatTemplateError(f"The tokenizer in {settings.model_path} has no end token; set its eos_token.")
    return model, tokenizer


def _make(settings: WarmStartSettings, folder: Path, progress: bool) -> None:
    """Make the model and write it, with its record, to ``folder``."""
    started = time.perf_counter()
    with _threads(settings.threads), WarmStartProgress(settings, progress) as shown:
        model, tokenizer = load_policy(settings)
        builder = PromptBuilder(
            tokenizer, settings.env, settings.max_prompt_tokens, settings.history_window, style=settings.response_style
        )
        demonstrations = collect(settings, tokenizer, builder, shown.game)
        examples = to_examples(demonstrations, settings.hindsight_fraction, settings.seed)
        steps, curve = _clone(settings, model, tokenizer, builder, examples, shown)
        shown.evaluation()
        with HeldOutGames(settings, EVALUATED_GAMES, settings.evaluation_games, tokenizer, builder) as games:
            result = games.play(model, settings.seed)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    record = {
        "settings": settings.to_dict(),
        "success_rate": result.success_rate,
        "episodes": result.episodes,
        "interval": result.interval,
        "invalid_share": result.invalid_share,
        "steps": steps,
        "examples": len(examples),
        "curve": curve,
        "seconds": time.perf_counter() - started,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")


def _clone(
    settings: WarmStartSettings,
    model: PreTrainedModel,
    tokenizer: Any,
    builder: PromptBuilder,
    examples: list[Example],
    shown: WarmStartProgress,
) -> tuple[int, list[dict[str, float]]]:
    """Update until a check reaches the target; return the updates done and the curve of the checks."""
    schedule = Schedule(settings.optimizer, settings.learning_rate, settings.matrix_learning_rate, settings.max_steps)
    cloner = Cloner(
        model,
        examples,
        schedule,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        batch_size=settings.batch_size,
        prompt_weight=settings.prompt_weight,
        renaming=Renaming(Renamer(tokenizer), settings.renaming_probability),
        seed=settings.seed,
    )
    started, curve, accuracies = time.perf_counter(), [], []
    with HeldOutGames(settings, CHECKED_GAMES, settings.check_games, tokenizer, builder) as games:
        for step in range(1, settings.max_steps + 1):
            loss, right = cloner.step()
            accuracies.append(right)
            shown.update(step, loss)
            if step % settings.check_every or sum(accuracies[-25:]) < LEAST_RESPONSE_ACCURACY * 25:
                continue
            result = games.play(model, settings.seed)
            curve.append(_point(step, time.perf_counter() - started, result))
            shown.check(result)
            if result.success_rate >= settings.target_success:
                return step, curve
    _log.warning(
        "Cloning ended after %d updates below the target success of %.0f %%; raise max_steps or games, "
        "or choose easier games.",
        settings.max_steps,
        100 * settings.target_success,
    )
    return settings.max_steps, curve


def _point(step: int, seconds: float, result: PlayResult) -> dict[str, float]:
    return {
        "step": step,
        "seconds": round(seconds, 2),
        "success_rate": result.success_rate,
        "invalid_share": result.invalid_share,
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """PyTorch with ``count`` threads, and afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
