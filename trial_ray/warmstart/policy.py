"""The policy of a warm start: the model that it starts from, where it computes, and its success in held-out games."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trial_ray.config.recorded import require_data
from trial_ray.config.run import EARLIER_CHAT_TEMPLATE_KWARGS
from trial_ray.engines.local import LocalEngine
from trial_ray.engines.protocol import SamplingParams
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import ChatTemplateError, CheckpointError, ConfigError, InfrastructureError
from trial_ray.evaluation.statistics import wilson_interval
from trial_ray.models.tiny import build_tiny_model, build_tokenizer
from trial_ray.models.vocabulary import stop_tokens_of
from trial_ray.rollout.chat_template import TemplateOptions
from trial_ray.rollout.env_runner import run_quietly
from trial_ray.rollout.episode import Player, PolicyPlayer, derive_seed, play_episode
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.warmstart.demonstrations import collect_texts
from trial_ray.warmstart.settings import WarmStartSettings, task_set

_log = logging.getLogger(__name__)
RECORD = "warmstart.json"
"""File beside a model that a warm start made: its settings and results."""


def model_files(folder: Path) -> list[Path]:
    """The files that make a model and its tokenizer.

    Raises:
        CheckpointError: ``folder`` holds no model.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no model: config.json is missing. Give a folder in Hugging Face format.")
    return [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model")]


def recorded_settings(folder: Path) -> WarmStartSettings:
    """The settings that a model was warm-started with; the defaults for a model of other origin.

    Raises:
        CheckpointError: the record cannot be read.
    """
    path = folder / RECORD
    if not path.is_file():
        return WarmStartSettings()
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        recorded = require_data(settings, settings, {}, path)
        return WarmStartSettings(**{"chat_template_kwargs": EARLIER_CHAT_TEMPLATE_KWARGS, **recorded})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no record of a warm start of this version ({type(error).__name__}: {error}). Remove it, and state the "
            "settings with --set."
        ) from error


def load_policy(settings: WarmStartSettings, entry: EnvironmentEntry) -> tuple[PreTrainedModel, Any]:
    """The model to clone into, in float32 on the settings' device, and its tokenizer.

    Raises:
        CheckpointError: ``model_path`` holds no causal LM with a tokenizer.
        ChatTemplateError: the tokenizer has no chat template or no end token.
    """
    if settings.model_path is None:
        vocabulary = entry.adapter.warm_start.vocabulary
        built = build_tokenizer(vocabulary, () if vocabulary else collect_texts(settings, entry))
        return build_tiny_model(built, settings.size, settings.seed).to(settings.device), built  # type: ignore[arg-type]
    model_files(Path(settings.model_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.model_path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{settings.model_path} holds no causal LM that transformers can load: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ChatTemplateError(f"The tokenizer in {settings.model_path} has no end token; set its eos_token.")
    return model.to(settings.device), tokenizer  # type: ignore[arg-type]  # transformers wraps Module.to without its types


def prompt_builder(settings: WarmStartSettings, entry: EnvironmentEntry, tokenizer: Any) -> PromptBuilder:
    """Writes prompts exactly as rollouts do."""
    template = entry.adapter.template(settings.response_style)
    options = TemplateOptions(settings.chat_template_kwargs, settings.chat_template_date)
    return PromptBuilder(tokenizer, template, settings.max_prompt_tokens, settings.history_window, options)


@contextmanager
def computing_with(settings: WarmStartSettings) -> Iterator[None]:
    """PyTorch with the settings' number of threads, and afterwards with as many as before.

    Raises:
        ConfigError: ``device`` is ``cuda`` where there is none.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "The warm start's setting device is 'cuda', but PyTorch finds no CUDA device here; set device=cpu, or compute on a "
            "machine that has one."
        )
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Watch = Callable[[str, Player, GuardedEnv], Player]
IN_FLIGHT = 64
"""Episodes in play at the same time."""


@dataclass(frozen=True, slots=True)
class PlayResult:
    """Result of an evaluation.

    Attributes:
        successes: episodes won.
        episodes: episodes played, one a task, without those that failed.
        invalid_share: share of turns whose action the environment did not understand.
    """

    successes: int
    episodes: int
    invalid_share: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> PlayResult:
        """The result of these episodes."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        won = sum(trajectory.success for trajectory in trajectories)
        invalid = sum(turn.invalid_action for turn in turns) / len(turns) if turns else 0.0
        return cls(won, len(trajectories), invalid)

    @property
    def success_rate(self) -> float:
        """Share of episodes won."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.episodes)


class HeldOutGames:
    """Tasks of one purpose, whose environments stay loaded so that they can be played again and again; a context manager.

    Args:
        settings: limits of responses, number of tasks.
        entry: the environment.
        purpose: of the tasks, as in :func:`~trial_ray.warmstart.settings.task_set`.
        tokenizer: decodes responses.
        builder: writes prompts, exactly as rollouts do.
    """

    def __init__(
        self,
        settings: WarmStartSettings,
        entry: EnvironmentEntry,
        purpose: int,
        tokenizer: Any,
        builder: PromptBuilder,
    ) -> None:
        self._params = SamplingParams(settings.max_response_tokens)
        self._tokenizer = tokenizer
        self._builder = builder
        self._entry, self._tasks = task_set(settings, entry, purpose)
        self._envs = [GuardedEnv(self._entry) for _ in range(min(len(self._tasks), IN_FLIGHT))]

    def __enter__(self) -> HeldOutGames:
        """Return the games themselves."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def play(self, model: PreTrainedModel, seed: int) -> PlayResult:
        """Play each task once; arguments and errors as :meth:`trajectories`."""
        return PlayResult.of(self.trajectories(model, seed))

    def trajectories(self, model: PreTrainedModel, seed: int, watch: Watch | None = None) -> Sequence[Trajectory]:
        """Play each task once; same model, seed and threads, same trajectories, one a task that did not fail.

        Args:
            model: the policy.
            seed: of the responses.
            watch: makes the player of one episode from its task, the policy's player and the environment that it plays in.

        Raises:
            InfrastructureError: environment or engine failed in every episode; in some of them, a warning says so.
        """
        training = model.training
        model.eval()
        ends = stop_tokens_of(model.config, model.generation_config, self._tokenizer)
        engine = LocalEngine(model, frozenset(ends))
        with asyncio.Runner() as loop:
            trajectories = run_quietly(loop, self._play_all(engine, seed, watch))
        model.train(training)
        ended = [trajectory for trajectory in trajectories if not trajectory.failed]
        if len(ended) < len(trajectories):
            first = next(trajectory.error for trajectory in trajectories if trajectory.failed)
            message = (
                f"{len(trajectories) - len(ended)} of {len(trajectories)} held-out games failed; the first: {first}"
            )
            if not ended:
                raise InfrastructureError(message)
            _log.warning("%s. They are not counted.", message)
        return ended

    async def _play_all(self, engine: LocalEngine, seed: int, watch: Watch | None) -> Sequence[Trajectory]:
        free = list(self._envs)
        slots = asyncio.Semaphore(len(free))

        async def play(task: str) -> Trajectory:
            async with slots:
                env = free.pop()
                player: Player = PolicyPlayer(self._builder, self._params, engine.generate, derive_seed(seed, task))
                if watch is not None:
                    player = watch(task, player, env)
                trajectory = await play_episode(env, task, player)
                if env.faulty:
                    env.close()
                    self._envs[self._envs.index(env)] = env = GuardedEnv(self._entry)
                free.append(env)
                return trajectory

        return await asyncio.gather(*(play(task) for task in self._tasks))
