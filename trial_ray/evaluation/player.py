"""Plays an evaluation set with the policy of a training run, a saved model, an expert, or the environment's own solutions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

import torch

from trial_ray.adapters.adapter import Speaker, begin, plan
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.weights import TEXT_FACTOR, TextLogprobs, own_logprobs, pack_weights, text_ids, weights_checksum
from trial_ray.errors import EnvironmentFaultError, UserInputError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.evaluation.results import CHAT_TEMPLATE, EvaluationResult
from trial_ray.files import Json, finite
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.models.tensors import engine_tensors
from trial_ray.prompts.chat_template import describe_chat_template
from trial_ray.prompts.styles import template_options
from trial_ray.rollout.env_runner_pool import EnvRunnerPool
from trial_ray.rollout.episode import History, derive_seed, play_episode
from trial_ray.rollout.groups import GroupRequest, GroupSample, RolloutCounts, SampleSettings, failure_of
from trial_ray.rollout.runner_group import TextEnvRunnerGroup
from trial_ray.secrets import without_secrets
from trial_ray.trajectory import EpisodeResult, Trajectory, Turn

logger = logging.getLogger(__name__)

Known = Mapping[str, Sequence[EpisodeResult]]
"""All episodes of each finished task, by task id."""


def policy_protocol(config: RunSettings, evaluation_set: EvaluationSet, entry: EnvironmentEntry) -> Json:
    """Return the protocol of an evaluation: all settings that determine its result besides the policy.

    Raises:
        ConfigError: ``model_path`` has no tokenizer.
        ChatTemplateError: the tokenizer's chat template cannot be rendered.
    """
    options = template_options(config)
    described = describe_chat_template(load_tokenizer(str(config.model_path)), options)
    return {**prompt_protocol(config, evaluation_set, entry), CHAT_TEMPLATE: described}


def prompt_protocol(config: RunSettings, evaluation_set: EvaluationSet, entry: EnvironmentEntry) -> Json:
    """Return the evaluation protocol for a policy whose chat template is unknown; see :func:`policy_protocol`."""
    return {
        **scripted_protocol(evaluation_set, entry),
        **({"stop_strings": list(config.stop_strings)} if config.stop_strings else {}),
        **({"tool_format": config.tool_format} if config.tool_format else {}),
        "temperature": config.evaluation_temperature,
        "top_p": config.evaluation_top_p,
        "sampling_seed": config.evaluation_seed,
        "max_prompt_tokens": config.max_prompt_tokens,
        "max_response_tokens": config.max_response_tokens,
        "history_window": config.history_window,
        "prompt_style": config.prompt_style,
        CHAT_TEMPLATE: {"kwargs": dict(config.chat_template_kwargs)},
    }


def play_evaluation_set(
    config: RunSettings,
    pool: EnvRunnerPool,
    evaluation_set: EvaluationSet,
    entry: EnvironmentEntry,
    known: Known | None = None,
    on_episode: Callable[[EpisodeResult], None] = lambda episode: None,
    *,
    recorded: bool = False,
) -> EvaluationResult:
    """Play every task of an evaluation set that is not in ``known`` with env runners and engines, during training or without it.

    The sampling seed of each response depends only on ``evaluation_seed``, the evaluation set's environment and split, the
    task, the index of the task's episode, and the turn. The seed does not depend on other tasks or on the number of env runners
    and engines, so the result of a task is the same in a small and in the full evaluation set.

    If an engine or the environment failed in an episode, the task is played again, up to ``max_group_redraws`` times.

    Args:
        config: sampling settings and limits.
        pool: env runners, which are connected to the engines.
        evaluation_set: the tasks.
        entry: environment in the config, with the keyword arguments for the evaluation set.
        known: finished episodes by task, which are not played again.
        on_episode: called with each episode of a task once the task's last episode is completed; the order of tasks is arbitrary.
        recorded: whether to record each episode in the config's ``trajectories_folder`` before ``on_episode`` is called.

    Returns:
        All episodes, in the order of the evaluation set.

    Raises:
        InfrastructureError: some episodes failed on every attempt; the episodes of all other tasks were passed to
            ``on_episode``.
        EnvironmentFaultError: some episodes failed on every attempt, and all failures were the environment's.
    """
    entries = [entry if other.name == entry.name else other for other in config.environment_entries()]
    settings = SampleSettings(
        env_configs=tuple(dict(other.config) for other in entries),
        params=SamplingParams(
            config.max_response_tokens,
            config.evaluation_temperature,
            config.evaluation_top_p,
            stop=tuple(config.stop_strings),
        ),
        seeded=True,
        in_evaluation=True,
        recorded=recorded,
    )
    place, environment = (config.evaluation_seed, evaluation_set.env_id, evaluation_set.split), entries.index(entry)
    requests = [
        GroupRequest(index, task, evaluation_set.rollouts, derive_seed(*place, task), environment)
        for index, task in enumerate(evaluation_set.task_ids)
    ]
    episodes: dict[str, Sequence[EpisodeResult]] = dict(known or {})
    failed: dict[str, GroupSample] = {}
    losses: list[str] = []
    counts = RolloutCounts()
    for attempt in range(1 + config.max_group_redraws):
        pending = [request for request in requests if request.task_id not in episodes]
        if not pending:
            break
        if attempt:
            pool.repair(len(pending))
        with closing(pool.stream_groups(pending, settings)) as samples:
            for sample in samples:
                counts += sample.counts
                task = sample.request.task_id
                if any(episode.failed for episode in sample.episodes):
                    failed[task] = sample
                else:
                    failed.pop(task, None)
                    episodes[task] = sample.episodes
                    for episode in sample.episodes:
                        on_episode(episode)
        if failed:
            first = next(iter(failed.values())).errors[0]
            logger.warning("Episodes of %d of %d tasks failed; the first: %s", len(failed), len(pending), first)
        losses += pool.pop_losses()
    if missing := len(set(evaluation_set.task_ids) - episodes.keys()):
        message = f"{missing} of the evaluation set's {len(evaluation_set)} tasks could not be played"
        raise failure_of(message, list(failed.values()), losses)
    ordered = [episode for task in evaluation_set.task_ids for episode in episodes[task]]
    return EvaluationResult(
        policy_protocol(config, evaluation_set, entry), ordered, str(config.model_path), counts=counts
    )


class Evaluator:
    """Evaluates a saved model on Ray actors, without training.

    Engines load the model folder, as in a training run, and then receive the weights from this process. Every engine
    verifies the checksum of the received weights, and compares its log-probabilities of a fixed text with this process's.

    Args:
        config: validated config with a model folder as ``model_path``.

    Attributes:
        weights: checksum of the weights in the engines' format, available before any actor starts.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, config: RunSettings) -> None:
        self._config = config
        self._dtype = getattr(torch, config.engine_dtype())
        self._model: torch.nn.Module | None = load_causal_lm(str(config.model_path), config.model_dtype)
        self.weights = weights_checksum(engine_tensors(self._model, self._dtype))

    @contextmanager
    def playing(self) -> Iterator[EnvRunnerPool]:
        """Start the actors, yield the env runners, which are connected to engines with the model's weights, and stop the actors.

        The actors are stopped at the end of the context, which can be entered only once.
        """
        config = self._config
        with ExitStack() as stack:
            engines = EnginePool(**config.engine_pool_arguments())
            stack.callback(engines.stop)
            runners = TextEnvRunnerGroup(
                env_creator=None,
                config=config,
                local_env_runner=config.create_local_env_runner,
                num_env_runners=actor_range(config.num_env_runners)[0],
            )
            stack.callback(runners.stop)
            engines.start(config.engine_start_timeout_s)
            assert self._model is not None, "entered twice"
            ids = text_ids(load_tokenizer(str(config.model_path)))
            limit = TEXT_FACTOR * config.logprob_diff_limit()
            text = TextLogprobs(ids, own_logprobs(self._model, ids), limit, type(self._model).__name__)
            engines.sync(pack_weights(engine_tensors(self._model, self._dtype), version=1, text=text))
            self._model = None  # Free the memory: Ray's object store has the weights.
            yield EnvRunnerPool(config, runners, engines)


# -- players without a model ---------------------------------------------------------------------------------------------


class WalkthroughPlayer:
    """Plays the environment's own solution of the current task, and stops after its last action.

    Args:
        env: the environment.
        seed: not used; all players without a model have this argument.
    """

    name = "walkthrough oracle"

    def __init__(self, env: GuardedEnv, seed: int = 0) -> None:
        self._env = env

    async def act(self, result: StepResult, history: History, step: int) -> Turn | None:
        """Return the next action of the solution; ``None`` after the last one.

        Raises:
            UserInputError: the environment has no solution.
        """
        if step == 1:
            self._actions = self._env.walkthrough()
            if not self._actions:
                raise UserInputError(f"{self._env.name} has no walkthrough, so there is no oracle for it.")
        return Turn(action=self._actions[step - 1]) if step <= len(self._actions) else None


class ExpertPlayer:
    """Plays with the expert of the environment's adapter.

    The expert receives the same information as a policy. An expert that is a ``SolutionReader`` also receives the environment's
    solution of the task.

    Args:
        env: the environment.
        seed: seed of the expert.

    Raises:
        UserInputError: the adapter has no expert.
    """

    name = "expert"

    def __init__(self, env: GuardedEnv, seed: int) -> None:
        create = env.adapter.warm_start.demonstrator
        if create is None:
            raise UserInputError(f"The adapter of {env.name} has no expert: its warm_start has no demonstrator.")
        self._env, self._seed, self._expert = env, seed, create()

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        """Return the expert's action, and its response if the expert writes responses."""
        expert = self._expert
        if step == 1:
            begin(expert, result.task, result.observation, self._seed, self._env.walkthrough)
        action, _ = plan(expert, result.observation, result.admissible_actions)
        expert.carried_out(action)
        return Turn(action=action, response=expert.response(action) if isinstance(expert, Speaker) else "")


def evaluate_scripted(
    player: type[WalkthroughPlayer | ExpertPlayer],
    evaluation_set: EvaluationSet,
    entry: EnvironmentEntry,
    known: Known,
    on_episode: Callable[[EpisodeResult], None],
    *,
    record: Callable[[Trajectory], None],
) -> None:
    """Play every task of an evaluation set that is not in ``known``, one after the other, with a player that uses no model.

    Args:
        player: class of the player.
        evaluation_set: the tasks.
        entry: the environment.
        known: finished episodes by task, which are not played again.
        on_episode: called with every episode when it ends.
        record: called with every trajectory, before ``on_episode``.

    Raises:
        EnvironmentFaultError: the environment cannot be created, or fails on a task.
        UserInputError: the environment has no walkthrough, or its adapter has no expert.
    """
    with closing(GuardedEnv(entry)) as env:
        for task in (task for task in evaluation_set.task_ids if task not in known):
            trajectory = asyncio.run(play_episode(env, task, player(env, derive_seed(evaluation_set.split, task))))
            if trajectory.failed:
                raise EnvironmentFaultError(trajectory.error)
            record(trajectory)
            on_episode(EpisodeResult.from_trajectory(trajectory))


def scripted_protocol(evaluation_set: EvaluationSet, entry: EnvironmentEntry) -> Json:
    """Return the evaluation protocol for players without a model, such as the expert, on ``evaluation_set``."""
    adapter = entry.describe().get("adapter")
    # Omit the split, which evaluation_set.protocol() has, and the folder of the data, which may differ between machines.
    config = {name: value for name, value in without_secrets(entry.config).items() if name not in ("split", "data")}
    return {
        **evaluation_set.protocol(),
        "env_config": finite(config, default=str),  # Use JSON types, so that the protocol equals its saved copy.
        **({} if adapter is None else {"adapter": adapter}),
        "max_turns": entry.max_turns,
    }
