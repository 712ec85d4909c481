"""Two policies on one game, each taking its most probable responses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trial_ray.config.run import RunSettings
from trial_ray.engines.batching import Request
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.engines.transformers import DecodingBatch, stop_token_ids
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import InfrastructureError
from trial_ray.models.module import load_causal_lm, load_tokenizer
from trial_ray.reports.allocation import trace_trajectories
from trial_ray.reports.traces import Trace
from trial_ray.rollout.conversation import prompt_writer
from trial_ray.rollout.episode import PolicyPlayer, play_episode


def trace_pair(
    models: dict[str, Path], task_id: str, entry: EnvironmentEntry, config: RunSettings, gap_clip: float
) -> dict[str, Trace]:
    """Play one game greedily with each model, in this process, and score each model's own decisions.

    Args:
        models: model folders by what they are called.
        task_id: the game.
        entry: its environment.
        config: prompts, limits and the hindsight view; the same for all.
        gap_clip: c of Eq. 4, in nats.
    """
    return {name: trace_game(folder, task_id, entry, config, gap_clip) for name, folder in models.items()}


def trace_game(model: Path, task_id: str, entry: EnvironmentEntry, config: RunSettings, gap_clip: float) -> Trace:
    """One game, played greedily by one model.

    Raises:
        InfrastructureError: the environment failed.
    """
    lm, tokenizer = load_causal_lm(str(model), config.model_dtype), load_tokenizer(str(model))
    prompts = prompt_writer(tokenizer, config, entry.adapter)
    greedy = SamplingParams(config.max_response_tokens, temperature=0.0)
    stop_ids = frozenset(stop_token_ids(str(model)))

    async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        return decode(lm, stop_ids, prompt_ids, params)

    player = PolicyPlayer(prompts, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), greedy, generate)
    env = GuardedEnv(entry)
    try:
        trajectory = asyncio.run(play_episode(env, task_id, player))
    finally:
        env.close()
    if trajectory.failed:
        raise InfrastructureError(f"The game could not be played: {trajectory.error}")
    (trace,) = trace_trajectories(lm, tokenizer, [trajectory], config, gap_clip)
    return trace


def decode(lm: Any, stop_ids: frozenset[int], prompt_ids: np.ndarray, params: SamplingParams) -> Response:
    """One response, from the batch that the transformers engine decodes with."""
    request = Request(prompt_ids, params)
    batch = DecodingBatch(lm, stop_ids)
    with torch.inference_mode():
        batch.admit([request])
        while not request.finish_reason:
            batch.step()
    return request.response(weight_version=0)
