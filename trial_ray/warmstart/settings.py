"""Settings of a warm start: every field decides what the resulting model is, so together they are its cache key."""

# Without annotations from __future__, which would be texts: check_settings reads the types.

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trial_ray.config.declare import check_settings, setting
from trial_ray.errors import ConfigError

CHOSEN = frozenset({"split", "num_games", "generator_seed"})
"""Keyword arguments of generated tasks, which the warm start chooses itself."""


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """What is cloned into which model, from which games, and when to stop.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    env: str = "trial/ALFWorld-v0"
    """Gymnasium id; in a config's ``warm_start`` the config's own environment, with its keyword arguments, unless it is named."""
    env_config: Mapping[str, Any] = setting(factory=lambda: {"difficulty": "tiny", "max_turns": 20})
    """Keyword arguments of the environment, save ``split``, ``num_games`` and ``generator_seed`` (set here)."""
    model_path: str | None = None
    """Folder of a causal LM with a chat template, in Hugging Face format; ``None`` builds the tiny default model."""
    size: str = "tiny"
    """Shape of the default model, a key of ``trial_ray.models.tiny.SHAPES``; unused with ``model_path``."""
    # In a conversation action noise would contradict the demonstrated response, which stands in all later prompts.
    response_style: Literal["plain", "tagged"] = setting("plain", one_of=("plain", "tagged"))
    """``plain`` responses are the action alone; ``tagged`` ones put it inside ``<action>``, as instruct models do."""
    history_window: int = setting(2, at_least=0)
    """(observation, action) pairs that a prompt shows; must be what training uses later."""
    max_prompt_tokens: int = setting(512, at_least=1)
    """Limit of a prompt, as in training."""
    max_response_tokens: int = setting(16, at_least=1)
    """Limit of a sampled response when success is measured."""
    games: int = setting(250, at_least=1)
    """Generated games that the oracle plays."""
    episodes_per_game: int = setting(4, at_least=1)
    """Episodes of each of them, with different seeds of the oracle."""
    action_noise: float = setting(0.1, within=(0, 1))
    """How often something else than the oracle's action is carried out (an admissible action or a malformed one). The
    example still holds the oracle's action: the policy sees what mistakes lead to, and how to go on from there."""
    suboptimal_probability: float = setting(0.0, within=(0, 1))
    """How often the demonstrator does any other admissible thing than it planned, and is imitated in that too. The policy
    knows how to act but wastes turns: a habit that reinforcement learning can unlearn."""
    hindsight_fraction: float = setting(0.25, within=(0, 1))
    """Share of examples whose prompt is the hindsight view: the outcome of the action carried out stands in it, and the
    response is the planned action. Large models can read such evidence from the start; a tiny one has to be taught before
    hindsight can weigh its turns. Below 1."""
    hindsight_wasted_share: float = setting(0.5, within=(0, 1))
    """Of the hindsight views, how many show the outcome of another action than the planned one (a suboptimal one, or noise)."""
    renaming_probability: float = setting(0.5, within=(0, 1))
    """Share of examples in which names are exchanged at random, so that responses must be copied and not guessed."""
    optimizer: Literal["muon", "adamw"] = setting("muon", one_of=("muon", "adamw"))
    """``muon`` orthogonalises the updates of matrices and leaves the rest to AdamW (a model from scratch learns to copy
    in a third of the steps); ``adamw`` is for pretrained models."""
    learning_rate: float = setting(3e-3, above=0)
    """Of AdamW, at the end of the warm-up."""
    matrix_learning_rate: float = setting(0.02, above=0)
    """Of Muon, at the end of the warm-up; unused with ``adamw``."""
    batch_size: int = setting(16, at_least=1)
    """Examples in an update."""
    prompt_weight: float = setting(0.3, at_least=0)
    """Weight of the loss on prompt tokens; it teaches copying."""
    max_steps: int = setting(800, at_least=1)
    """Updates at most; the learning rate falls linearly to zero over so many."""
    target_success: float = setting(0.35, within=(0, 1))
    """Cloning stops at the first check that reaches this success, so that reinforcement learning can improve on it."""
    check_every: int = setting(50, at_least=1)
    """Updates between checks; a check plays ``check_games`` held-out games."""
    check_games: int = setting(64, at_least=1)
    """Games of a check. They decide when to stop, hence are others than those of the final evaluation."""
    evaluation_games: int = setting(192, at_least=1)
    """Games of the final evaluation, which neither cloning nor checks have seen; one episode each."""
    generator_seed: int = setting(1_000_003, at_least=0)
    """Seed of the demonstrated games; checks use the next one, the final evaluation the one after."""
    seed: int = setting(0, at_least=0)
    """Of initial weights, order of examples, demonstrator, action noise and sampling."""
    threads: int = setting(2, at_least=1)
    """Threads of PyTorch while it clones. Sums depend on it, so it is fixed for the sake of repeatable results."""
    device: Literal["cpu", "cuda"] = setting("cpu", one_of=("cpu", "cuda"))
    """Where it clones and plays: ``cuda`` for pretrained models. Only a CPU gives the same model again, bit for bit."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "env_config": dict(self.env_config)}
