"""Settings of a warm start, which are part of its cache key, and the tasks for demonstrations, checks and evaluation."""

# check_settings() reads the types, which `from __future__ import annotations` would turn into strings.

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trial_ray.adapters.registry import TRAIN, EnvironmentEntry, warm_start_seed_tasks
from trial_ray.config.declare import check_settings, setting
from trial_ray.errors import ConfigError
from trial_ray.files import text_digest

CHOSEN = frozenset({"split", "num_games", "generator_seed"})
"""Environment arguments that the warm start sets; the setting ``env_config`` must not contain them."""


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of a warm start: model, games, cloning and stop criteria.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    env: str = setting(
        "trial/ALFWorld-v0", "Gymnasium id; the default in a config is the config's environment with its arguments"
    )
    env_config: Mapping[str, Any] = setting(
        doc="keyword arguments of the environment, without ``split``, ``num_games`` and ``generator_seed``, which are "
        "set here",
        factory=lambda: {"difficulty": "tiny", "max_turns": 20},
    )
    model_path: str | None = setting(
        None, "Hugging Face folder of a causal LM with a chat template; ``None`` builds the tiny model"
    )
    size: str = setting("tiny", "shape of the tiny model, a key of ``trial_ray.models.tiny.SHAPES``")
    tool_format: Literal["hermes"] | None = setting(
        None,
        "with ``tools``: ``hermes`` for chat templates without tools; the default in a config is the config's",
    )
    # The prompt style "conversation" is not among the values: its prompts contain the earlier responses, and demonstrated responses
    # have empty reasoning.
    response_style: Literal["plain", "tagged", "tools"] = setting(
        "plain",
        "``plain``: the response is the action; ``tagged``: the action is in ``<action>``; ``tools``: the response calls a "
        "tool (needs ``tool_format`` or ``model_path``). In a config, this and the next four settings default to the config's",
    )
    chat_template_kwargs: Mapping[str, Any] = setting(
        factory=dict, doc="variables of the chat template, such as ``enable_thinking``"
    )
    history_window: int = setting(2, "(observation, action) pairs in a prompt", at_least=0)
    max_prompt_tokens: int = setting(512, "longest prompt", at_least=1)
    max_response_tokens: int = setting(16, "longest response when success is measured", at_least=1)
    chat_template_date: str | None = setting(
        None, "day that chat templates which write the date show, ``YYYY-MM-DD``; ``None``: the day of the warm start"
    )
    games: int = setting(250, "generated games that the expert plays", at_least=1)
    episodes_per_game: int = setting(4, "episodes of each, with different seeds of the expert", at_least=1)
    action_noise: float = setting(
        0.1,
        "probability of executing another action (admissible or malformed) than the expert's, which stays the example: "
        "the policy sees mistakes and how to recover from them",
        within=(0, 1),
    )
    suboptimal_probability: float = setting(
        0.0,
        "probability that the expert takes, and the policy imitates, an admissible action other than the planned one: a "
        "habit that reinforcement learning can unlearn",
        within=(0, 1),
    )
    hindsight_fraction: float = setting(
        0.25,
        "share of examples with the outcome of the executed action in the prompt and the planned action as response; "
        "below 1. A small model has to learn to read hindsight",
        within=(0, 1),
    )
    hindsight_wasted_share: float = setting(
        0.5,
        "share of the hindsight examples that show the outcome of an action other than the planned one",
        within=(0, 1),
    )
    renaming_probability: float = setting(
        0.5, "share of examples with names exchanged at random: the model must copy, not guess", within=(0, 1)
    )
    optimizer: Literal["muon", "adamw"] = setting(
        "muon",
        "``muon`` for matrices and AdamW for the rest (from scratch), or ``adamw`` (pretrained models)",
    )
    learning_rate: float = setting(3e-3, "learning rate of AdamW after the warm-up", above=0)
    matrix_learning_rate: float = setting(0.02, "learning rate of Muon after the warm-up", above=0)
    batch_size: int = setting(16, "examples per update", at_least=1)
    prompt_weight: float = setting(0.3, "weight of the loss on prompt tokens, which teaches copying", at_least=0)
    max_steps: int = setting(800, "maximum updates; the learning rate falls linearly to 0 over them", at_least=1)
    target_success: float = setting(
        0.35,
        "cloning stops at the first check that reaches this success, which leaves room for reinforcement learning",
        within=(0, 1),
    )
    check_every: int = setting(50, "updates between checks; fewer while success grows fast", at_least=1)
    check_games: int = setting(64, "held-out games of a check; the final evaluation has others", at_least=1)
    evaluation_games: int = setting(
        192, "games of the final evaluation, unseen by cloning and checks; one episode each", at_least=1
    )
    generator_seed: int = setting(
        1_000_003,
        "seed of the demonstrated games; checks use the next one, the final evaluation the one after",
        at_least=0,
    )
    seed: int = setting(
        0, "seed of weights, order of examples, expert, action noise and sampling", within=(0, 2**63 - 1)
    )
    threads: int = setting(2, "PyTorch threads for cloning, fixed because sums depend on it", at_least=1)
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "dtype of cloning's forward and backward passes; ``bfloat16`` (autocast) is faster on processors with bfloat16",
    )
    device: Literal["cpu", "cuda"] = setting(
        "cpu",
        "device of cloning and playing: ``cuda`` for pretrained models; only ``cpu`` is repeatable bit for bit",
    )

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if isinstance(self.model_path, str | os.PathLike):
            object.__setattr__(self, "model_path", os.path.expanduser(self.model_path))
        check_settings(self, "Warm-start setting ")
        reserved = CHOSEN & set(self.env_config)
        if reserved:
            raise ConfigError(f"env_config sets {sorted(reserved)}, which the warm start chooses; leave them out.")
        if self.hindsight_fraction == 1:
            raise ConfigError("Warm-start setting hindsight_fraction is 1, expected a float below 1.")


DEMONSTRATED, CHECKED, EVALUATED = 0, 1, 2
"""Purposes of tasks: demonstrations, checks, evaluation. Tasks are generated with the seed ``generator_seed`` plus the purpose."""


def task_set(
    settings: WarmStartSettings, entry: EnvironmentEntry, purpose: int
) -> tuple[EnvironmentEntry, Sequence[str]]:
    """Return the environment, and the tasks for ``purpose``: generated tasks, seeds, or a part of the split ``train``.

    The purposes are ``DEMONSTRATED``, ``CHECKED`` and ``EVALUATED``; no task is used for two of them.

    Raises:
        ConfigError: the split ``train`` has fewer tasks than the three purposes need, or
            ``settings.generator_seed`` selects seeds of another split.
    """
    needs = [settings.games, settings.check_games, settings.evaluation_games]
    if (generated := entry.adapter.warm_start.generated) is not None:
        entry = entry.with_config(**generated(settings.generator_seed + purpose, needs[purpose]))
        return entry, entry.tasks()
    training = entry.with_config(split=TRAIN)
    if (listed := training.listed_tasks()) is not None:
        entry = training
        tasks = sorted(listed, key=lambda task: text_digest(f"{settings.generator_seed}\n{task}"))
        if len(tasks) < sum(needs):
            raise ConfigError(
                f"The split {entry.split!r} of {entry.env_id} has {len(tasks)} tasks, but the warm start needs {sum(needs)} "
                f"(games={needs[0]}, check_games={needs[1]}, evaluation_games={needs[2]}); lower them, or give the adapter "
                "`generated`, which makes further tasks."
            )
    else:
        tasks = warm_start_seed_tasks(settings.generator_seed, sum(needs))
    return entry, tasks[sum(needs[:purpose]) : sum(needs[: purpose + 1])]


def require_tasks(settings: WarmStartSettings, entry: EnvironmentEntry) -> None:
    """Reject a split with too few tasks, without playing or generating tasks.

    Raises:
        ConfigError: the split ``train`` has fewer tasks than the warm start needs. If the environment lists no tasks: the warm
            start needs too many seeds, or ``settings.generator_seed`` selects seeds of another split.
    """
    if entry.adapter.warm_start.generated is None:
        task_set(settings, entry, EVALUATED)
