"""The initial policy of a run: from a folder, the model hub, a warm start, or a model that comes with a package."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trial_ray.config.declare import did_you_mean, fields_of
from trial_ray.config.run import RunSettings
from trial_ray.errors import ConfigError
from trial_ray.models.folders import model_folder
from trial_ray.models.packaged import PREFIX, packaged_folder
from trial_ray.process import release_memory

if TYPE_CHECKING:
    from trial_ray.environments.adapter import EnvironmentAdapter
    from trial_ray.warmstart.settings import WarmStartSettings

PROMPTS = {
    "response_style": "prompt_style",
    "chat_template_kwargs": "chat_template_kwargs",
    "history_window": "history_window",
    "max_prompt_tokens": "max_prompt_tokens",
    "max_response_tokens": "max_response_tokens",
}
"""Settings of the warm start that are the config's where it does not say them, with the config's names."""


def initial_policy(config: RunSettings) -> str:
    """The model folder that training starts from; made or fetched, and cached, where the config only describes it.

    The driver calls it once, and every actor gets the same folder.

    Raises:
        ConfigError: there is no such folder, and the model hub offers no such model.
        ConfigError, CheckpointError, ChatTemplateError: the warm start's settings or model are wrong.
        MissingDependencyError: the packaged model is not installed.
    """
    if config.warm_start is not None:
        from trial_ray.warmstart import warm_start

        settings, adapters = warm_start_settings(config)
        if settings.model_path is not None:
            settings = replace(settings, model_path=policy_folder(settings.model_path))
        path = str(warm_start(settings, adapters, config.env_specs).path)
        release_memory()
        return path
    return policy_folder(str(config.model_path))


def require_initial_policy(config: RunSettings) -> None:
    """Check the settings of the config's warm start and the number of its tasks; loads no model.

    Raises:
        ConfigError: the settings are wrong, or the environment has too few tasks for them.
    """
    if config.warm_start is not None:
        from trial_ray.environments.registry import make_entries
        from trial_ray.models.tiny import POSITIONS
        from trial_ray.warmstart.settings import require_tasks

        settings, adapters = warm_start_settings(config)
        (entry,) = make_entries([(settings.env, settings.env_config, 1.0)], adapters, config.env_specs)
        require_tasks(settings, entry)
        if settings.model_path is None and (found := config.row_tokens()) > POSITIONS:
            raise ConfigError(
                f"max_prompt_tokens + max_response_tokens is {found}, but a model that the warm start makes has "
                f"{POSITIONS} positions; lower them, or set warm_start's model_path."
            )


def warm_start_settings(config: RunSettings) -> tuple[WarmStartSettings, list[EnvironmentAdapter]]:
    """The settings of the config's warm start, ``model_path`` as given, and the adapter of its environment.

    Where the config has no warm start, those that one would have without settings of its own.

    Raises:
        ConfigError: a setting is unknown, out of its range, or contradicts the config's.
    """
    from trial_ray.warmstart.settings import CHOSEN, WarmStartSettings

    described, known = config.warm_start or {}, fields_of(WarmStartSettings)
    for name in described:
        if name not in known:
            raise ConfigError(f"warm_start has no setting {name!r}.{did_you_mean(str(name), known)}")
    own = {name: getattr(config, trained) for name, trained in PROMPTS.items()}
    if described.get("env", config.env) == config.env:
        kept = {name: value for name, value in config.env_config.items() if name not in CHOSEN}
        own |= {"env": config.env, "env_config": kept}
    settings = WarmStartSettings(**{**own, **described})
    if settings.response_style != config.prompt_style:
        raise ConfigError(
            f"warm_start: response_style={settings.response_style!r} found, but prompt_style is {config.prompt_style!r}: the "
            "policy would be trained in a form that it has not learned. Leave response_style out, or set prompt_style to the same."
        )
    return settings, [adapter for adapter in config.adapters if adapter.env_id == settings.env]


def policy_folder(model_path: str) -> str:
    """The folder of a model; fetched or made where it is a name on the model hub or of a package.

    Raises:
        ConfigError, MissingDependencyError: as :func:`initial_policy`.
    """
    return str(packaged_folder(model_path)) if model_path.startswith(PREFIX) else model_folder(model_path)
