"""Allocation traces of a model: TRIAL's turn scores and weights on recorded trajectories, and on games that it plays greedily."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from trial_ray.algorithms.methods.trial import TRIALConfig
from trial_ray.engines.local import LocalEngine
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.transformers import stop_token_ids
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import InfrastructureError
from trial_ray.learner.connectors import encode_views
from trial_ray.learner.packing import score_rows
from trial_ray.learner.rows import TurnRows, required
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.reports.traces import Trace, TracedTurn
from trial_ray.rollout.conversation import prompt_writer
from trial_ray.rollout.episode import PolicyPlayer, play_episode
from trial_ray.rollout.trajectory import Trajectory


def trace_trajectories(
    lm: PreTrainedModel, tokenizer: Any, trajectories: Sequence[Trajectory], config: TRIALConfig
) -> list[Trace]:
    """Score recorded responses in both views with the given weights, and allocate as the learner does.

    Args:
        lm: the policy; both views are scored by it.
        tokenizer: its tokenizer.
        trajectories: at least one, each with at least one turn.
        config: environment, view, limits, and c of Eq. 4.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    trajectory_ids = torch.repeat_interleave(torch.arange(len(trajectories)), lengths)
    rows = TurnRows(turns, trajectory_ids, torch.zeros(len(turns)), encode_views(trajectories, config, tokenizer))
    ordinary, hindsight = score_rows(
        lm,
        rows.model_rows(range(len(rows)), with_evidence=True),
        max_tokens=config.max_tokens_per_forward,
        temperature=config.temperature,
    )
    rows.logprobs, rows.hindsight_logprobs = ordinary.float().cpu(), hindsight.float().cpu()
    config.method_class(config).prepare(rows, [], 1)
    numbers = zip(required(rows.scores).tolist(), required(rows.weights).tolist(), rows.lengths.tolist(), strict=True)
    traces = []
    for trajectory in trajectories:
        adapter, actions = config.adapter_of(trajectory.environment), [turn.action for turn in trajectory.turns]
        classes = adapter.turn_classes(actions, trajectory.ended == "terminated")
        traced = [
            TracedTurn(turn.action, turn.outcome, name, *next(numbers))
            for turn, name in zip(trajectory.turns, classes, strict=True)
        ]
        traces.append(Trace(trajectory.task_id, trajectory.family, trajectory.success, traced))
    return traces


def trace_game(model: Path, task_id: str, entry: EnvironmentEntry, config: TRIALConfig) -> Trace:
    """One game, played greedily by one model in this process, which then scores its own decisions.

    Args:
        model: its folder.
        task_id: the game.
        entry: its environment.
        config: prompts, limits and the hindsight view.

    Raises:
        InfrastructureError: the environment failed.
    """
    lm, tokenizer = load_causal_lm(str(model), config.model_dtype), load_tokenizer(str(model))
    prompts = prompt_writer(tokenizer, config, entry.adapter)
    greedy = SamplingParams(config.max_response_tokens, temperature=0.0)
    engine = LocalEngine(lm, frozenset(stop_token_ids(str(model))))
    player = PolicyPlayer(
        prompts, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), greedy, engine.generate
    )
    env = GuardedEnv(entry)
    try:
        trajectory = asyncio.run(play_episode(env, task_id, player))
    finally:
        env.close()
    if trajectory.failed:
        raise InfrastructureError(f"The game could not be played: {trajectory.error}")
    (trace,) = trace_trajectories(lm, tokenizer, [trajectory], config)
    return trace
