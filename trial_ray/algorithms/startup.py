"""Preparation and checks of a run's inputs: the initial policy, environments and tasks, prompts, and memory."""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from trial_envs.errors import TrialEnvError
from trial_envs.program import answer_action
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.guarded import ContractError, GuardedEnv, StepResult, required_keys
from trial_ray.adapters.registry import EnvironmentEntry, make_entries
from trial_ray.adapters.templates import PromptContext, require_task
from trial_ray.algorithms.tasks import SuccessRateSampler, TaskSampler
from trial_ray.config.declare import did_you_mean, fields_of
from trial_ray.config.run import RunSettings
from trial_ray.config.sampling import actor_range
from trial_ray.engines.requirements import require_engine, require_engine_arguments
from trial_ray.engines.settings import check_positions
from trial_ray.errors import CheckpointError, ConfigError, EnvironmentFaultError, PromptTooLongError, TrialRayError
from trial_ray.evaluation.evaluation_sets import EvaluationSet
from trial_ray.files import files_digest
from trial_ray.models.folders import PREFIX, WEIGHTS, model_folder, packaged_folder
from trial_ray.models.loading import load_tokenizer
from trial_ray.planning.fit import Machine, require_fit
from trial_ray.planning.memory import PlanRequest
from trial_ray.planning.time import gpu_bytes
from trial_ray.process import release_memory
from trial_ray.prompts.chat_template import describe_chat_template
from trial_ray.prompts.styles import prompt_writer, template_options
from trial_ray.prompts.teacher_context import FRAMES, require_room
from trial_ray.prompts.writer import located

if TYPE_CHECKING:
    from trial_ray.warmstart.settings import WarmStartSettings

logger = logging.getLogger(__name__)

SHARED = ("tool_format", "chat_template_kwargs", "history_window", "max_prompt_tokens", "max_response_tokens")
"""Settings of the warm start whose defaults are the values of the config's settings of the same names."""
Config = TypeVar("Config", bound=AlgorithmConfig)
FirstTurn = tuple[EnvironmentEntry, str, StepResult]
"""An environment, its first task, and the result of ``reset`` for the task."""


def require_inputs(config: RunSettings) -> None:
    """Check that all inputs are available, before Ray starts; a model on the hub is downloaded into the hub's cache.

    Raises:
        ConfigError: a model, an environment, a split or an engine is unknown or unavailable, a split has too few tasks, or the
            engine cannot be started with its arguments and this model.
        MissingDependencyError: the engine or a packaged model is not installed.
        TrialEnvError: the data of an environment are missing.
    """
    require_engine(config.engine, config.num_gpus_per_engine)
    require_initial_policy(config)
    for entry in config.environment_entries():
        if entry.weight:
            entry.tasks()
    for entry in config.evaluation_entries():
        EvaluationSet.choose(entry.env_id, entry.split, entry.tasks(), config.evaluation_num_tasks)
    if config.teacher_model is not None:
        policy_folder(config.teacher_model)
    path = config.model_path if config.warm_start is None else config.warm_start.get("model_path")
    folder = None if path is None else policy_folder(str(path))
    require_engine_arguments(
        config.engine, folder, config.engine_pool_arguments()["engine_kwargs"], config.num_gpus_per_engine
    )


# -- the first policy --------------------------------------------------------------------------------------------------


def initial_policy(config: RunSettings) -> str:
    """Return the model folder that training starts from.

    The folder of a warm start or of a packaged model is created, the folder of a hub model is downloaded, and both are cached.
    The driver calls this function, and every actor gets the same folder.

    Raises:
        ConfigError: the folder does not exist, and the model hub does not have such a model.
        ConfigError, CheckpointError, ChatTemplateError: the warm start's settings or model are wrong.
        MissingDependencyError: the packaged model is not installed.
    """
    if config.warm_start is None:
        return policy_folder(str(config.model_path))
    from trial_ray.warmstart import warm_start

    settings, adapters = warm_start_settings(config)
    if settings.model_path is not None:
        settings = replace(settings, model_path=policy_folder(settings.model_path))
    path = str(warm_start(settings, adapters, config.env_specs).path)
    release_memory()
    return path


def require_initial_policy(config: RunSettings) -> None:
    """Check the settings of the config's warm start and the number of its tasks; loads no model.

    Raises:
        ConfigError: the settings are wrong, or the environment has too few tasks for them.
    """
    if config.warm_start is None:
        return
    from trial_ray.models.tiny import POSITIONS
    from trial_ray.warmstart.settings import require_tasks

    settings, adapters = warm_start_settings(config)
    (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters, config.env_specs)
    require_tasks(settings, entry)
    if settings.model_path is None and (row_tokens := config.row_tokens()) > POSITIONS:
        raise ConfigError(
            f"max_prompt_tokens + max_response_tokens is {row_tokens}, but a warm-started model has {POSITIONS} positions; lower "
            "them, or set warm_start's model_path."
        )


def warm_start_settings(config: RunSettings) -> tuple[WarmStartSettings, list[EnvironmentAdapter]]:
    """Return the settings of the config's warm start, with ``model_path`` as given, and the adapter of its environment.

    If the config has no warm start, the settings are those of an empty ``warm_start`` dict.

    Raises:
        ConfigError: a setting is unknown, out of its range, or contradicts a setting of the config.
    """
    from trial_ray.warmstart.settings import CHOSEN, WarmStartSettings

    described, known = config.warm_start or {}, fields_of(WarmStartSettings)
    for name in described:
        if name not in known:
            raise ConfigError(f"warm_start has no setting {name!r}.{did_you_mean(str(name), known)}")
    own = {"response_style": config.prompt_style, **{name: getattr(config, name) for name in SHARED}}
    if described.get("env", config.env) == config.env:
        kept = {name: value for name, value in config.env_config.items() if name not in CHOSEN}
        own |= {"env": config.env, "env_config": kept}
    settings = WarmStartSettings(**{**own, **described})
    if settings.response_style != config.prompt_style:
        raise ConfigError(
            f"warm_start: response_style is {settings.response_style!r}, but prompt_style is {config.prompt_style!r}: the policy "
            "would be trained in another format than it has learned. Leave response_style out, or set prompt_style to the same."
        )
    return settings, [adapter for adapter in config.adapters if adapter.env_id == settings.env.rpartition(":")[2]]


def policy_folder(model_path: str) -> str:
    """Return the folder of a model; a model on the hub is downloaded, and a packaged model is created.

    Raises:
        ConfigError, MissingDependencyError: as in :func:`initial_policy`.
    """
    return str(packaged_folder(model_path)) if model_path.startswith(PREFIX) else model_folder(model_path)


# -- tasks, limits and memory ------------------------------------------------------------------------------------------


def list_tasks(config: RunSettings) -> tuple[TaskSampler, list[FirstTurn]]:
    """Return the sampler of the training tasks and each environment's first turn; check each environment by playing a turn.

    Raises:
        ConfigError: there is no task, an environment raised or breaks the contract of text environments, or it does not provide a
            feature that the settings need.
    """
    evaluated = {entry.name: entry for entry in config.evaluation_entries()}
    # An environment of weight 0 is only evaluated, and may have no training split.
    entries = [entry if entry.weight else evaluated[entry.name] for entry in config.environment_entries()]
    tasks = [entry.tasks() for entry in entries]
    first_turns = [
        (entry, listed[0], check_environment(entry, listed, config))
        for entry, listed in zip(entries, tasks, strict=True)
        if listed
    ]
    sampler = SuccessRateSampler if config.task_sampling == "success_rate" else TaskSampler
    return sampler(tasks, config.seed or 0, [entry.weight for entry in entries]), first_turns


def episodes_at_once(config: RunSettings) -> int:
    """Return the maximum number of episodes that all env runners of a run play at once."""
    runners = max(1, actor_range(config.num_env_runners)[1])
    ready = config.tasks_per_iteration * config.group_size * (1 + config.max_staleness)
    limit = runners * config.max_episodes_in_flight
    # An evaluation set may have more tasks than training starts at once.
    return limit if config.evaluation_split else min(limit, ready)


def resolved(config: Config, folder: Path | None) -> Config:
    """Return the config, frozen, with a model folder and the date that chat templates may show.

    Model folders, created or downloaded once, replace a warm start and the names of hub models and packaged models.

    Args:
        config: config of the run.
        folder: folder of the run's Tune trial, to which folders of recordings are relative; ``None`` outside Tune.
    """
    resolved_config: Any = config.copy(copy_frozen=False)
    resolved_config.rl_module(model_path=initial_policy(config), warm_start=None).fix_date()
    if config.teacher_model is not None:
        resolved_config.teacher_model = policy_folder(config.teacher_model)
    for name in ("trajectories_folder", "training_folder"):
        if folder is not None and getattr(config, name):
            setattr(resolved_config, name, str(folder / getattr(config, name)))
    resolved_config.freeze()
    return resolved_config


def require_tokens(config: RunSettings, first_turns: list[FirstTurn]) -> dict[str, Any]:
    """Check the limits on tokens and the teacher's vocabulary with the policy's tokenizer.

    The first prompt of every environment, and the fixed text around a teacher context, must fit the limits.

    Returns:
        The tokenizer's chat template, as returned by :func:`describe_chat_template`.

    Raises:
        ConfigError, PromptTooLongError, ChatTemplateError: a check failed; the message contains the change to make.
    """
    tokenizer = load_tokenizer(str(config.model_path))
    described = describe_chat_template(tokenizer, template_options(config))
    for entry, task, shown in first_turns:
        writer = prompt_writer(tokenizer, config, entry.adapter)
        try:
            writer.write(shown, ())
        except PromptTooLongError as error:
            raise PromptTooLongError(located(error, entry.name, task, 1)) from error
    if config.teacher_model is not None:
        require_same_vocabulary(tokenizer, config.teacher_model)
    if config.teacher_context is not None:
        require_room(FRAMES[config.teacher_context], tokenizer, config.max_outcome_tokens)
        check_positions(str(config.model_path), config.row_tokens() + config.max_outcome_tokens)
    return described


def require_same_vocabulary(tokenizer: Any, teacher_model: str) -> None:
    """Reject a teacher with another vocabulary than the policy's; padding of the teacher's embedding is allowed.

    Args:
        tokenizer: the policy's tokenizer.
        teacher_model: folder of the teacher.

    Raises:
        ConfigError: a token, its id or a special token differs; the message names the first difference.
    """
    both = (tokenizer, load_tokenizer(teacher_model))
    vocabularies = [{index: token for token, index in reader.get_vocab().items()} for reader in both]
    special = [{token: token for token in reader.all_special_tokens} for reader in both]
    for kind, (own, other) in (("token", vocabularies), ("special token", special)):
        if differing := sorted({key for key, _ in own.items() ^ other.items()}):
            key = differing[0]
            raise ConfigError(
                f"teacher_model={teacher_model!r} has another vocabulary than the policy: {kind} {key!r} is "
                f"{other.get(key)!r} for the teacher and {own.get(key)!r} for the policy ({len(differing)} differ). Choose a "
                "teacher of the policy's family."
            )


def teacher_digest(config: RunSettings) -> str | None:
    """Return the digest of the teacher model's weights, which checkpoints record; ``None`` without a teacher model."""
    if config.teacher_model is None:
        return None
    folder = Path(config.teacher_model)
    return files_digest(file for pattern in WEIGHTS for file in folder.glob(pattern))


def require_memory(config: RunSettings) -> None:
    """Reject a run with learners or engines that do not fit on their requested GPUs, if the memory of the GPUs is known.

    Raises:
        ConfigError: the run does not fit; the message contains settings that fit, or other advice.
    """
    if config.num_gpus_per_learner or config.num_gpus_per_engine:
        require_fit(PlanRequest.of(config), Machine(None, gpu_bytes(ray.cluster_resources())))


def compare_initial_weights(config: RunSettings, current: dict[str, str], recorded: dict[str, str]) -> None:
    """Compare the weights at ``model_path`` with those at the start of the run.

    Checkpoints do not contain frozen weights (the base weights of LoRA adapters, the KL reference), so a resumed run takes them
    from ``model_path``. A warning is logged if the KL reference has changed.

    Args:
        config: config of the run.
        current: checksum and dtype of the weights that were first sent to the engines.
        recorded: checksum and dtype at the start of the run.

    Raises:
        CheckpointError: LoRA adapters were trained with other base weights.
    """
    # Checksums of weights in different dtypes cannot be compared.
    if current == recorded or current["dtype"] != recorded["dtype"]:
        return
    adapted = config.lora_rank is not None
    message = (
        f"The model in {config.model_path} has other weights than at the start of the run (checksum {current['checksum']}, "
        f"expected {recorded['checksum']}), so the {'policy' if adapted else 'KL reference'} has changed. Restore that model, or "
        "start a new run."
    )
    if adapted:
        raise CheckpointError(message)
    if config.ref_kl_coeff > 0:
        logger.warning(message)


def check_environment(entry: EnvironmentEntry, tasks: list[str], config: RunSettings) -> StepResult:
    """Play one turn of the first task and check the results; log a warning if two resets with one seed differ.

    Args:
        entry: the environment.
        tasks: ids of its tasks.
        config: config of the run.

    Returns:
        Result of ``reset`` for the first task.

    Raises:
        ConfigError: the environment raised or breaks the contract of text environments, ``info`` lacks a key that the reward needs,
            it allows fewer episodes at once than the run plays, there is no solution for the teacher context ``"solution"``, or
            the prompt template leaves out the task; the message names the environment.
    """
    style, at_once = config.prompt_style, episodes_at_once(config)
    env = GuardedEnv(entry)
    try:
        start = env.reset(tasks[0], 0)
        solution, instances = env.walkthrough(), env.max_instances()
        # Take a step with an action that the environment should accept, if such an action is known.
        action = next(iter(start.admissible_actions), None if style == "tools" else "look")
        if start.call is not None:
            action = answer_action("look")
        if action is not None:
            env.step(action)
            _require_keys(entry, config.reward, env.info_keys)
        _warn_of_other_start(entry, tasks[0], start, env.reset(tasks[0], 0))
    except EnvironmentFaultError as error:
        # Raise a typed cause itself, because its message already states the remedy.
        if isinstance(error.__cause__, (TrialEnvError, TrialRayError)):
            raise error.__cause__ from None
        raise _config_error(error) from error
    finally:
        env.close()
    if instances is not None and at_once > instances:
        raise ConfigError(
            f"The run plays up to {at_once} episodes at once (max_episodes_in_flight on each env runner), but "
            f"{entry.env_id} has {instances} sessions on its server. Lower .env_runners(max_episodes_in_flight=...), or raise the "
            "server's limit (--max-sessions of trial_envs.openenv)."
        )
    if config.teacher_context == "solution" and entry.weight and not solution:
        raise ConfigError(
            f"teacher_context='solution' needs an environment with a solution, but {entry.env_id} has no `walkthrough`. Add it to "
            "the environment, or choose another teacher_context."
        )
    context = PromptContext(start.task, start.observation, start.admissible_actions, (), 2)
    require_task(entry.adapter.template(style), context, entry.env_id)
    if entry.adapter.own_template(style) is None:
        logger.warning(
            "%s has no prompt template for %s prompts: the generic template is used. Set one with "
            "EnvironmentAdapter(templates={%r: ...}).",
            entry.env_id,
            style,
            style,
        )
    return start


def _require_keys(entry: EnvironmentEntry, reward: Any, info_keys: set[str]) -> None:
    """Require the keys of ``info`` that the reward needs."""
    if missing := [key for key in required_keys(entry, reward) if key not in info_keys]:
        raise ConfigError(
            f"The info of {entry.env_id} lacks {', '.join(map(repr, missing))}, which reward={reward!r} needs (found "
            f"{', '.join(sorted(info_keys)) or 'no keys'}). Add it to info, define when an episode is won with "
            "EnvironmentAdapter(success=...), or choose reward='score' or 'return'."
        )


def _config_error(error: EnvironmentFaultError) -> ConfigError:
    """Return the error for the user, with a note that names the line of the environment that raised the error."""
    config_error, cause = ConfigError(str(error)), error.__cause__
    if cause and not isinstance(cause, ContractError):
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        config_error.add_note(f"in {frame.filename}, line {frame.lineno}")
    return config_error


def _warn_of_other_start(entry: EnvironmentEntry, task_id: str, first: StepResult, second: StepResult) -> None:
    shown = ("task", "observation", "admissible_actions")
    if changed := [name for name in shown if getattr(first, name) != getattr(second, name)]:
        logger.warning(
            "%s, task %r: two resets with the same seed differ in %s. The rollouts of a group are attempts at one task; "
            "if their starts differ, advantages also compare the difficulty of these starts. Let reset depend on its seed and "
            "options only.",
            entry.env_id,
            task_id,
            " and ".join(changed),
        )
