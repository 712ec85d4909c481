"""The config with which a checkpoint is evaluated: the settings of its run, with another environment, split or override."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import UserInputError
from trial_ray.evaluation.evaluation_sets import SEED

if TYPE_CHECKING:
    from trial_ray.adapters.adapter import EnvironmentAdapter
    from trial_ray.algorithms.grpo import GRPOConfig

ORACLE = "oracle"


def recorded_config(model: Path, adapters: Sequence[EnvironmentAdapter]) -> tuple[GRPOConfig | None, dict[str, Any]]:
    """Return the recorded config of a model's run at the model's iteration, and labels for tables.

    The labels are method, backbone and seed of the run, and the checkpoint's iteration. The result is ``(None, {})`` if the model
    is not in a run folder.
    """
    from trial_ray.runs.checkpoints import checkpoint_iteration, find_run_folder
    from trial_ray.runs.config_record import load_method, load_record, run_labels

    if (run_folder := find_run_folder(model)) is None:
        return None, {}
    record, iteration = run_folder / "resolved_config.json", checkpoint_iteration(model, run_folder)
    config = load_record(record, adapters, iteration=iteration)
    trained = {} if iteration is None else {"iteration": iteration}
    return config, {**run_labels(config), "method": load_method(record), **trained}


def checkpoint_config(
    checkpoint: str,
    env: str | None,
    split: str | None,
    overrides: list[str],
    adapters: Sequence[EnvironmentAdapter] = (),
) -> tuple[GRPOConfig, dict[str, Any]]:
    """Return the config for the evaluation of a checkpoint.

    If the checkpoint is in a run folder, the config has the settings of the run at the checkpoint's iteration. For
    :data:`ORACLE` it has no model.

    Args:
        checkpoint: a run folder, a checkpoint, a model folder, or :data:`ORACLE`.
        env: the environment's id; ``None``: the environment of the run.
        split: the environment's split; ``None``: the split of the run's evaluation set.
        overrides: ``key=value`` overrides of other settings.
        adapters: the user's environment adapters.

    Returns:
        The config, and the labels for tables as in :func:`recorded_config`.

    Raises:
        UserInputError: ``env`` is ``None``, but the checkpoint is not in a run with a single environment; or ``split`` is
            ``None``, but the checkpoint is not in a run with an evaluation set for ``env``.
    """
    from trial_ray.adapters.registry import find_spec
    from trial_ray.algorithms.methods import new_config, with_method
    from trial_ray.runs.checkpoints import find_model
    from trial_ray.runs.overrides import apply_overrides

    env = env and find_spec(env).id  # An id such as MODULE:ID imports MODULE, which a run's record may not do.
    model = None if checkpoint == ORACLE else find_model(checkpoint)
    recorded, labels = recorded_config(model, adapters) if model else (None, {})
    # Nothing is trained, so no method's needs are checked.
    config = with_method(recorded or new_config("grpo"), "grpo")
    evaluated, trained = config.evaluation_entries(), config.environment_entries()
    entries = evaluated or trained
    by_id = {entry.env_id: entry for entry in reversed(entries)}
    if env is None:
        if len(by_id) != 1:
            environments = f"its run plays {', '.join(sorted(by_id))}" if by_id else "it is not part of a run"
            raise UserInputError(f"Choose the environment of {checkpoint} with --env ID: {environments}.")
        (env,) = by_id
    several = sum(entry.env_id == env for entry in entries) > 1
    if several and not any(override.startswith("env_config") for override in overrides):
        raise UserInputError(
            f"The run of {checkpoint} plays {env} with several keyword arguments. Choose them with --set env_config={{...}}."
        )
    if split is None:
        if env not in by_id or not evaluated:
            raise UserInputError(
                f"Choose a split with --split NAME: {checkpoint} is not part of a run with an evaluation set for {env}."
            )
        split = by_id[env].split
    source = by_id.get(env) or next((entry for entry in trained if entry.env_id == env), None)
    own = [adapter for adapter in adapters if adapter.env_id == env] if recorded else adapters
    if any(entry.env_id == env for entry in trained):
        # environment() would replace settings of the run that equal the class's by the adapter's defaults.
        config.env, config.environments, config.adapters = env, (), tuple(own)
    else:
        config.environment(env, adapter=own)
    config.env_config = {**(source.config if source else {}), "split": split}
    config.rl_module(model_path=str(model) if model else None, warm_start=None)
    config.evaluation(evaluation_split=split, evaluation_env_config={}, evaluation_seed=SEED)
    config.recording(trajectories_folder=None)
    config.training(teacher_context=None, teacher_sync_iterations=None)
    config = apply_overrides(config, overrides)
    config.env_config = {"split": split, **config.env_config}  # --set env_config={…} replaces the whole dict
    # The labels describe the run's model, not another one that --set names.
    return config, labels if model is None or config.model_path == str(model) else {}
