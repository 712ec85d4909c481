"""Settings of a warm start: every field decides what the resulting model is, so together they are its cache key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trial_envs.core.projection import ResponseStyle
from trial_ray.errors import ConfigError

CHOSEN = frozenset({"split", "num_games", "generator_seed"})
"""Keyword arguments of generated tasks, which the warm start chooses itself."""


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """What is cloned into which model, from which games, and when to stop.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    env: str = "trial/ALFWorld-v0"
    """Gymnasium id; in a config's ``warm_start`` the config's own environment, with its keyword arguments, unless it is named."""
    env_config: Mapping[str, Any] = field(default_factory=lambda: {"difficulty": "tiny", "max_turns": 20})
    """Keyword arguments of the environment, save ``split``, ``num_games`` and ``generator_seed`` (set here)."""
    model_path: str | None = None
    """Folder of a causal LM with a chat template, in Hugging Face format; ``None`` builds the tiny default model."""
    size: str = "tiny"
    """Shape of the default model, a key of ``trial_ray.models.tiny.SHAPES``; unused with ``model_path``."""
    response_style: ResponseStyle = "plain"
    """``plain`` responses are the action alone; ``tagged`` ones put it inside ``<action>``, as instruct models do."""
    history_window: int = 2
    """(observation, action) pairs that a prompt shows; must be what training uses later."""
    max_prompt_tokens: int = 512
    """Limit of a prompt, as in training."""
    max_response_tokens: int = 16
    """Limit of a sampled response when success is measured."""
    games: int = 250
    """Generated games that the oracle plays."""
    episodes_per_game: int = 4
    """Episodes of each of them, with different seeds of the oracle."""
    action_noise: float = 0.1
    """How often something else than the oracle's action is carried out (an admissible action or a malformed one). The
    example still holds the oracle's action: the policy sees what mistakes lead to, and how to go on from there."""
    suboptimal_probability: float = 0.0
    """How often the demonstrator does any other admissible thing than it planned, and is imitated in that too. The policy
    knows how to act but wastes turns: a habit that reinforcement learning can unlearn."""
    hindsight_fraction: float = 0.25
    """Share of examples whose prompt is the hindsight view: the outcome of the action carried out stands in it, and the
    response is the planned action. Large models can read such evidence from the start; a tiny one has to be taught before
    hindsight can weigh its turns. Below 1."""
    hindsight_wasted_share: float = 0.5
    """Of the hindsight views, how many show the outcome of another action than the planned one (a suboptimal one, or noise)."""
    renaming_probability: float = 0.5
    """Share of examples in which names are exchanged at random, so that responses must be copied and not guessed."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """``muon`` orthogonalises the updates of matrices and leaves the rest to AdamW (a model from scratch learns to copy
    in a third of the steps); ``adamw`` is for pretrained models."""
    learning_rate: float = 3e-3
    """Of AdamW, at the end of the warm-up."""
    matrix_learning_rate: float = 0.02
    """Of Muon, at the end of the warm-up; unused with ``adamw``."""
    batch_size: int = 16
    """Examples in an update."""
    prompt_weight: float = 0.3
    """Weight of the loss on prompt tokens; it teaches copying."""
    max_steps: int = 800
    """Updates at most; the learning rate falls linearly to zero over so many."""
    target_success: float = 0.35
    """Cloning stops at the first check that reaches this success, so that reinforcement learning can improve on it."""
    check_every: int = 50
    """Updates between checks; a check plays ``check_games`` held-out games."""
    check_games: int = 64
    """Games of a check. They decide when to stop, hence are others than those of the final evaluation."""
    evaluation_games: int = 192
    """Games of the final evaluation, which neither cloning nor checks have seen; one episode each."""
    generator_seed: int = 1_000_003
    """Seed of the demonstrated games; checks use the next one, the final evaluation the one after."""
    seed: int = 0
    """Of initial weights, order of examples, demonstrator, action noise and sampling."""
    threads: int = 2
    """Threads of PyTorch while it clones. Sums depend on it, so it is fixed for the sake of repeatable results."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it clones and plays: ``cuda`` for pretrained models. Only a CPU gives the same model again, bit for bit."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.model_path is not None:
            object.__setattr__(self, "model_path", os.path.expanduser(self.model_path))
        reserved = CHOSEN & set(self.env_config)
        if reserved:
            raise ConfigError(f"env_config sets {sorted(reserved)}, which the warm start chooses; leave them out.")
        for name in ("games", "episodes_per_game", "batch_size", "max_steps", "check_every", "check_games", "threads"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("evaluation_games", "max_response_tokens", "max_prompt_tokens"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "action_noise",
            "suboptimal_probability",
            "hindsight_fraction",
            "hindsight_wasted_share",
            "renaming_probability",
            "target_success",
        ):
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "between 0 and 1")
        self._require("hindsight_fraction", self.hindsight_fraction < 1, "below 1")
        for name in ("learning_rate", "matrix_learning_rate"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("prompt_weight", self.prompt_weight >= 0, "at least 0")
        # In a conversation action noise would contradict the demonstrated response, which stands in all later prompts.
        self._require("response_style", self.response_style in ("plain", "tagged"), "'plain' or 'tagged'")
        self._require("device", self.device in ("cpu", "cuda"), "'cpu' or 'cuda'")
        self._require("optimizer", self.optimizer in ("muon", "adamw"), "'muon' or 'adamw'")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"Warm-start setting {name} must be {expected}; found {getattr(self, name)!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "env_config": dict(self.env_config)}
