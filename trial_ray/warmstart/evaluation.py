"""Held-out success of a model: it plays games in lock-step, its responses sampled at temperature 1."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from trial_ray.evaluation.intervals import wilson_interval
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.warmstart.demonstrations import generated_env
from trial_ray.warmstart.settings import WarmStartSettings

SLOTS = 64
"""Games in play at the same time."""


@dataclass(frozen=True, slots=True)
class PlayResult:
    """Outcome of an evaluation.

    Attributes:
        successes: episodes won.
        episodes: episodes played, one a game.
        invalid_share: share of turns whose action the environment did not understand.
    """

    successes: int
    episodes: int
    invalid_share: float

    @property
    def success_rate(self) -> float:
        """Share of episodes won."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.successes, self.episodes)


@dataclass(slots=True)
class _Slot:
    """One game in play."""

    env: gymnasium.Env
    observation: str
    info: dict[str, Any]
    history: list[tuple[str, str]] = field(default_factory=list)
    over: bool = False
    won: bool = False
    invalid: int = 0

    def carry_out(self, action: str) -> None:
        self.history.append((self.observation, action))
        self.observation, _, terminated, truncated, self.info = self.env.step(action)
        self.over = terminated or truncated
        self.won = bool(self.info["won"])
        self.invalid += bool(self.info["invalid_action"])


class HeldOutGames:
    """Generated games of one seed, kept loaded so that they can be played again and again; a context manager.

    Args:
        settings: the environment, limits of prompts and responses, form of responses.
        seed_offset: added to the generator's seed: which games.
        games: how many.
        tokenizer: decodes responses.
        builder: writes prompts, exactly as rollouts do.
    """

    def __init__(
        self, settings: WarmStartSettings, seed_offset: int, games: int, tokenizer: Any, builder: PromptBuilder
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._builder = builder
        self._stack = ExitStack()
        slots = min(games, SLOTS)
        self._envs = [self._stack.enter_context(generated_env(settings, seed_offset, games)) for _ in range(slots)]
        self._tasks = [str(task) for task in self._envs[0].unwrapped.tasks("generated")]

    def __enter__(self) -> HeldOutGames:
        """Return the games themselves."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the environments."""
        self._stack.close()

    def play(self, model: PreTrainedModel, seed: int) -> PlayResult:
        """Play each game once with responses sampled at temperature 1; same model, seed and threads, same result."""
        training = model.training
        model.eval()
        slots: list[_Slot] = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for start in range(0, len(self._tasks), len(self._envs)):
                slots += self._play_wave(model, self._tasks[start : start + len(self._envs)])
        model.train(training)
        turns = sum(len(slot.history) for slot in slots)
        return PlayResult(sum(slot.won for slot in slots), len(slots), sum(slot.invalid for slot in slots) / turns)

    def _play_wave(self, model: PreTrainedModel, tasks: Sequence[str]) -> list[_Slot]:
        slots = [_Slot(env, *env.reset(options={"task": task})) for env, task in zip(self._envs, tasks, strict=False)]
        while playing := [slot for slot in slots if not slot.over]:
            responses = sample_responses(
                model, [self._prompt(slot) for slot in playing], self._tokenizer, self._settings.max_response_tokens
            )
            for slot, response in zip(playing, responses, strict=True):
                slot.carry_out(self._builder.template.project(response).action)
        return slots

    def _prompt(self, slot: _Slot) -> np.ndarray:
        return self._builder.build(
            task=slot.info["task"],
            observation=slot.observation,
            admissible_actions=slot.info["admissible_actions"],
            history=slot.history,
            step=len(slot.history) + 1,
        ).ids


def sample_responses(
    model: PreTrainedModel, prompts: Sequence[np.ndarray], tokenizer: Any, max_tokens: int
) -> list[str]:
    """One response to each prompt (int32 ``[P]`` each) from the model's own distribution, without special tokens."""
    width = max(map(len, prompts))
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, width - len(prompt) :] = 1
    sampling = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad_id,
    )
    sampled = model.generate(input_ids=ids, attention_mask=mask, generation_config=sampling)
    return tokenizer.batch_decode(sampled[:, width:], skip_special_tokens=True)
