"""The walkthrough oracle through the same results as a policy: the bound that an evaluation of this panel can reach."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trial_ray.errors import InfrastructureError, UserInputError
from trial_ray.evaluation.panel import Panel, turn_limit
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.rollout.trajectory import EpisodeResult

PROCESSES = 2
EPISODE_DEADLINE_S = 120.0

_env: Any = None


def evaluate_oracle(
    panel: Panel,
    env_config: dict[str, Any],
    known: Mapping[str, EpisodeResult] | None = None,
    on_episode: Callable[[EpisodeResult], None] = lambda episode: None,
) -> EvaluationResult:
    """Replay the walkthrough of every task of a panel, in two processes.

    Args:
        panel: the tasks.
        env_config: keyword arguments of the environment; the panel's split replaces the one in it.
        known: episodes by task that need not be played.
        on_episode: told of every episode as it ends, in any order.

    Returns:
        The episodes in the order of the panel.

    Raises:
        InfrastructureError: no episode ended within the deadline.
        trial_envs.errors.TrialEnvError: the environment cannot be made, or a game is broken.
    """
    keywords = {**env_config, "split": panel.split}
    finished = dict(known or {})
    pending = [task for task in panel.task_ids if task not in finished]
    context = multiprocessing.get_context("spawn")  # the game engine's library must not be shared by a fork
    with context.Pool(min(PROCESSES, len(pending)) or 1, _make_environment, (panel.env_id, keywords)) as pool:
        episodes = pool.imap_unordered(_play, pending)
        for done in range(len(pending)):
            try:
                episode = episodes.next(timeout=EPISODE_DEADLINE_S)
            except multiprocessing.TimeoutError:
                raise InfrastructureError(
                    f"No oracle episode ended within {EPISODE_DEADLINE_S:.0f} s ({done} of {len(pending)} had)."
                ) from None
            finished[episode.task_id] = episode
            on_episode(episode)
    ordered = [finished[task] for task in panel.task_ids]
    return EvaluationResult(oracle_protocol(panel, env_config), ordered, policy="walkthrough oracle")


def oracle_protocol(panel: Panel, env_config: dict[str, Any]) -> dict[str, Any]:
    """What decides the oracle's result on ``panel``."""
    return {**panel.protocol(), "max_turns": turn_limit(panel.env_id, env_config)}


def _make_environment(env_id: str, keywords: dict[str, Any]) -> None:
    import gymnasium

    import trial_envs

    global _env
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends its workers
    trial_envs.register()
    _env = gymnasium.make(env_id, **keywords, disable_env_checker=True)


def _play(task_id: str) -> EpisodeResult:
    _, info = _env.reset(options={"task": task_id})
    walkthrough: Sequence[str] | None = getattr(_env.unwrapped, "walkthrough", None)
    if walkthrough is None:
        raise UserInputError(f"{type(_env.unwrapped).__name__} has no walkthrough, so there is no oracle for it.")
    turns, terminated, truncated = 0, False, False
    for action in walkthrough:
        _, _, terminated, truncated, info = _env.step(action)
        turns += 1
        if terminated or truncated:
            break
    return EpisodeResult(
        task_id=task_id,
        family=info["family"],
        success=bool(info["won"]),
        score=float(info["score"]),
        turns=turns,
        ended="terminated" if terminated else "turn_limit",
    )
