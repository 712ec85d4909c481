"""Demonstrations: an oracle that explores as a player would plays generated games, and its decisions are written down.

The oracle knows the task, the answers so far and the actions on offer: nothing that a prompt could not hold. A solution
would show where hidden objects are, which no policy can learn to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import gymnasium
import numpy as np

import trial_envs
from trial_ray.errors import ConfigError
from trial_ray.hindsight import augment, encode_evidence, outcome_view
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.warmstart.cloning import Example
from trial_ray.warmstart.settings import WarmStartSettings

NEVER_SLIPPED = frozenset({"help"})
"""Actions that no prompt offers."""
MALFORMED_SHARE = 0.3
"""Of the slips, so many are actions that the environment does not understand."""


class Demonstrator(Protocol):
    """A player that sees no more than the policy."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Choose one of the admissible actions."""

    def carried_out(self, action: str) -> None:
        """Learn that ``action`` was carried out instead of the one it chose."""


DEMONSTRATORS = {
    "trial/ALFWorld-v0": "trial_envs.alfworld.oracle:ExplorerOracle",
    "trial/WebShop-v0": "trial_envs.webshop.explorer:ExplorerOracle",
}
"""Environment id → module and class of its demonstrator, imported when it plays."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One decision of the demonstrator.

    Attributes:
        prompt_ids: int32 ``[P]``, the ordinary prompt.
        insert_at: where in it evidence goes.
        response_ids: int32 ``[y]``, the response that states the action, end token included.
        evidence_ids: int32 ``[z]``, outcome of the action that was carried out.
        followed: whether that was the demonstrated action; otherwise the hand slipped.
        task_id: the game.
        actions: actions on offer; the demonstrated one is among them.
    """

    prompt_ids: np.ndarray
    insert_at: int
    response_ids: np.ndarray
    evidence_ids: np.ndarray
    followed: bool
    task_id: str
    actions: tuple[str, ...]


@contextmanager
def generated_env(settings: WarmStartSettings, seed_offset: int, games: int) -> Iterator[gymnasium.Env]:
    """The environment over generated games; another offset gives games that share no seed."""
    trial_envs.register()
    env = gymnasium.make(
        settings.env,
        disable_env_checker=True,
        **settings.env_config,
        split="generated",
        num_games=games,
        generator_seed=settings.generator_seed + seed_offset,
    )
    try:
        yield env
    finally:
        env.close()


def collect(
    settings: WarmStartSettings, tokenizer: Any, builder: PromptBuilder, on_game: Callable[[], None] = lambda: None
) -> list[Demonstration]:
    """Let the oracle play ``games`` × ``episodes_per_game`` episodes; one demonstration a turn.

    Args:
        settings: which games, how many episodes, how often the hand slips.
        tokenizer: writes responses and evidence.
        builder: writes prompts, exactly as rollouts do.
        on_game: called after each game.

    Raises:
        ConfigError: no oracle is known for the environment.
    """
    demonstrator = _demonstrator(settings.env)
    demonstrations: list[Demonstration] = []
    with generated_env(settings, 0, settings.games) as env:
        for game, task_id in enumerate(env.unwrapped.tasks("generated")):
            for episode in range(settings.episodes_per_game):
                recorder = _Recorder(settings, tokenizer, builder, [settings.seed, game, episode])
                demonstrations += recorder.play(env, str(task_id), demonstrator)
            on_game()
    return demonstrations


def collect_texts(settings: WarmStartSettings) -> Iterator[str]:
    """Tasks, observations and actions that the oracle meets in one undisturbed episode of every demonstrated game.

    Raises:
        ConfigError: no oracle is known for the environment.
    """
    demonstrator = _demonstrator(settings.env)
    with generated_env(settings, 0, settings.games) as env:
        for task_id in env.unwrapped.tasks("generated"):
            observation, info = env.reset(options={"task": task_id})
            demonstrator.reset(info["task"], observation, settings.seed)
            yield info["task"]
            over = False
            while not over:
                actions = info["admissible_actions"]
                action = demonstrator.act(observation, actions)
                yield "\n".join((observation, *actions, action))
                demonstrator.carried_out(action)
                observation, _, terminated, truncated, info = env.step(action)
                over = terminated or truncated


def demonstrator_package(env_id: str) -> str:
    """Folder inside ``trial_envs`` that holds the environment and its oracle.

    Raises:
        ConfigError: no oracle is known for the environment.
    """
    return _demonstrator_path(env_id).split(".")[1]


def _demonstrator(env_id: str) -> Demonstrator:
    module, _, name = _demonstrator_path(env_id).partition(":")
    demonstrator: Demonstrator = getattr(import_module(module), name)()
    return demonstrator


def _demonstrator_path(env_id: str) -> str:
    if env_id not in DEMONSTRATORS:
        known = ", ".join(DEMONSTRATORS)
        raise ConfigError(f"No oracle that explores is known for {env_id!r}; choose one of {known}.")
    return DEMONSTRATORS[env_id]


class _Recorder:
    """Plays one episode and writes down its turns."""

    def __init__(self, settings: WarmStartSettings, tokenizer: Any, builder: PromptBuilder, seed: list[int]) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._builder = builder
        self._random = np.random.default_rng(seed)

    def play(self, env: gymnasium.Env, task_id: str, demonstrator: Demonstrator) -> list[Demonstration]:
        observation, info = env.reset(options={"task": task_id})
        demonstrator.reset(info["task"], observation, int(self._random.integers(2**31)))
        history: list[tuple[str, str]] = []
        turns: list[Demonstration] = []
        over = False
        while not over:
            actions = tuple(info["admissible_actions"])
            prompt = self._builder.build(
                task=info["task"],
                observation=observation,
                admissible_actions=actions,
                history=history,
                step=len(history) + 1,
            )
            chosen = self._distraction(actions, demonstrator.act(observation, actions))
            carried_out = self._slip(actions) or chosen
            demonstrator.carried_out(carried_out)
            history.append((observation, carried_out))
            observation, _, terminated, truncated, info = env.step(carried_out)
            view = outcome_view(observation, terminal=terminated, success=bool(info["won"]))
            evidence = encode_evidence(view, self._tokenizer)
            response = encode_response(self._tokenizer, chosen, self._settings.response_style)
            followed = carried_out == chosen
            turns.append(Demonstration(prompt.ids, prompt.insert_at, response, evidence, followed, task_id, actions))
            over = terminated or truncated
        return turns

    def _distraction(self, actions: Sequence[str], planned: str) -> str:
        """The planned action, or now and then any other on offer, which is demonstrated all the same."""
        return self._any(actions) if self._random.random() < self._settings.suboptimal_probability else planned

    def _any(self, actions: Sequence[str]) -> str:
        return str(self._random.choice([action for action in actions if action not in NEVER_SLIPPED]))

    def _slip(self, actions: Sequence[str]) -> str | None:
        if self._random.random() >= self._settings.action_noise:
            return None
        action = self._any(actions)
        if self._random.random() < MALFORMED_SHARE:
            words = action.split()
            words[int(self._random.integers(len(words)))] = str(self._random.choice(actions)).split()[-1]
            return " ".join(words)
        return action


def encode_response(tokenizer: Any, action: str, style: str) -> np.ndarray:
    """Ids of the response that states an action, end token included: int32 ``[y]``."""
    text = action if style == "plain" else f"<think>\n\n</think>\n<action>{action}</action>"
    return np.asarray([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id], dtype=np.int32)


def to_examples(demonstrations: Sequence[Demonstration], hindsight_fraction: float, seed: int) -> list[Example]:
    """What is cloned: prompt and response, where ``hindsight_fraction`` of the prompts are hindsight views.

    A view shows the outcome of the action that was carried out, and the response is the oracle's. So the consequence of a
    good action speaks for it, while that of a slip speaks for what should have been done instead: the sign that the
    hindsight gap (Eq. 4) is to have.
    """
    draws = np.random.default_rng([seed, 1]).random(len(demonstrations))
    return [
        Example(_view(demonstration, hindsight=bool(draw < hindsight_fraction)), demonstration.response_ids)
        for demonstration, draw in zip(demonstrations, draws, strict=True)
    ]


def _view(demonstration: Demonstration, *, hindsight: bool) -> np.ndarray:
    if not hindsight:
        return demonstration.prompt_ids
    return augment(demonstration.prompt_ids, demonstration.insert_at, demonstration.evidence_ids)
