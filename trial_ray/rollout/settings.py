"""Settings of what plays episodes: prompts, responses, sampling in training, and the recording."""

from __future__ import annotations

import math

from trial_ray.environments.settings import EnvironmentSettings
from trial_ray.environments.templates import GENERIC, PromptStyle
from trial_ray.errors import ConfigError
from trial_ray.inference.admission import MIN_TEMPERATURE
from trial_ray.inference.protocol import is_whole
from trial_ray.inference.settings import EngineSettings
from trial_ray.models.settings import PolicySettings
from trial_ray.settings import Section, Settings, setting


class RecordingSettings(Settings):
    """What is kept of the episodes, and of the updates on them."""

    trajectories_folder: str | None = setting(
        None, "folder below which every training trajectory is written as Parquet; ``None`` writes nothing"
    )
    training_folder: str | None = setting(
        None,
        "folder below which every update writes what a replay needs and, as Parquet, what it did to each turn (weights, gaps, "
        "log-probabilities; see docs/runs.md); ``None`` writes nothing",
    )
    max_recorded_tokens: int = setting(
        1_000_000,
        "with ``training_folder``, most response tokens of an update whose turns are written, about 8 MB an iteration; of a "
        "larger update only what a replay needs is. 0 writes no turns",
        at_least=0,
    )

    recording = Section("Choose what is kept of training.")


class RolloutSettings(RecordingSettings):
    """How episodes are played."""

    max_prompt_tokens: int = setting(2048, "limit of the ordinary prompt", at_least=1)
    max_response_tokens: int = setting(512, "limit of a response, stop token included", at_least=1)
    temperature: float = setting(
        1.0,
        "of training rollouts, above 0. The policy that is trained is the tempered one: logits are divided by it wherever "
        "the learner computes log-probabilities, too",
    )
    top_p: float = setting(
        1.0, "nucleus mass of training rollouts; 1, because no correction for another is implemented"
    )
    history_window: int = setting(
        2,
        "observation/action pairs shown in a prompt; in a conversation, the turns that are kept where it exceeds "
        "``max_prompt_tokens`` and starts again",
        at_least=0,
    )
    prompt_style: PromptStyle = setting(
        "tagged",
        'each turn a prompt of its own, with ``"tagged"`` responses (reason in ``<think>``, act in ``<action>``) or '
        '``"plain"`` ones (the response is the action); or ``"conversation"``: the whole episode, with tagged responses',
        one_of=GENERIC,
    )
    seeded_sampling: bool = setting(False, "give every request a seed of its own, so that a run can be repeated")
    max_episodes_in_flight: int = setting(
        128,
        "episodes that one env runner plays at once; engines need some that run while environments step",
        at_least=1,
    )
    environment_processes: bool | None = setting(
        None,
        "whether each environment that is played gets a process of its own, so that one that hangs, crashes or grows costs its "
        "rollout alone; ``None``: those whose adapter says ``own_process``",
    )
    step_timeout_s: float = setting(
        120.0,
        "deadline of one ``reset`` or ``step`` of an environment in a process of its own, in seconds; its creation may take ten "
        "times as long. After it the process is ended and the rollout fails",
        above=0,
    )
    environment_memory_gb: float | None = setting(
        None,
        "GB that an environment in a process of its own may allocate; what exceeds it raises there, and the rollout fails",
        above=0,
    )
    request_timeout_s: float = setting(600.0, "deadline of one response, in seconds", above=0)
    max_group_redraws: int = setting(
        2, "times that a task is drawn again when fewer than 2 of its rollouts survived", at_least=0
    )
    max_staleness: int = setting(
        0,
        "versions by which the weights that sampled a turn may be older than those that are updated on it. 0: the learner "
        "waits until all groups of an iteration are finished, and env runners wait for the update; else they play on while "
        "it runs, and groups that are not finished enter a later update",
        at_least=0,
    )
    min_effective_sample_size: float = setting(
        0.5,
        "with ``max_staleness``, effective sample size of an update's importance ratios, as a share of its tokens, below "
        "which the next iteration is sampled by the current weights alone; 0 never",
        within=(0, 1),
    )

    rollouts = Section("Set how episodes are played.")

    def row_tokens(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.max_prompt_tokens + self.max_response_tokens

    def check_sampling(self) -> None:
        """Training needs the log-probabilities of the distribution that was sampled from.

        Raises:
            ConfigError: responses would be greedy, or from a nucleus.
        """
        if not (self.temperature >= MIN_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature is {self.temperature}, expected a finite value of at least {MIN_TEMPERATURE}: greedy responses have "
                "no distribution to take a gradient of. For greedy evaluation set .panel(temperature=0)."
            )
        if self.top_p != 1:
            raise ConfigError(
                f"top_p is {self.top_p}, expected 1: responses from a nucleus have other log-probabilities than those that are "
                "trained, and no correction for it is implemented. For evaluation set .panel(top_p=...)."
            )


class EarnedReward:
    """Part of a config: what an episode earns, which is set in :class:`~trial_ray.learner.settings.TrainingSettings`."""

    reward: str
    reward_scale: float
    advantage_statistics: str
    invalid_action_penalty: float


class PlaySettings(PolicySettings, RolloutSettings, EngineSettings, EarnedReward, EnvironmentSettings):
    """All that playing episodes with a policy needs; what trains it is not part of it."""

    def check_engines(self) -> None:
        """Refuse engines whose context is shorter than a prompt and a response, which would refuse the longest prompts.

        Raises:
            ConfigError: says both numbers, or what the engines' own check says.
        """
        super().check_engines()
        context = self.engine_kwargs.get("max_model_len", self.row_tokens())
        if is_whole(context) and context < self.row_tokens():
            raise ConfigError(
                f"engine_kwargs: max_model_len={context} found, at least {self.row_tokens()} expected (max_prompt_tokens "
                "plus max_response_tokens); leave it out, or lower max_prompt_tokens or max_response_tokens."
            )

    def check_policy(self) -> None:
        """Refuse two sources of the first policy, or none, or one that does not fit to the prompts.

        Raises:
            ConfigError: says which.
        """
        super().check_policy()
        if self.warm_start is not None and self.prompt_style == "conversation":
            raise ConfigError(
                "warm_start clones responses to prompts that stand alone, but prompt_style is 'conversation'. Choose "
                "prompt_style='tagged' or 'plain', or a model that can follow a conversation with .policy(model_path=...)."
            )
