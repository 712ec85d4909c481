"""The walkthrough oracle through the same results as a policy: the bound that an evaluation of this panel can reach."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

from trial_ray.errors import InfrastructureError
from trial_ray.evaluation.panel import Panel
from trial_ray.evaluation.results import EpisodeResult, EvaluationResult

PROCESSES = 2
EPISODE_DEADLINE_S = 120.0

_env: Any = None


def evaluate_oracle(
    panel: Panel,
    env_config: dict[str, Any],
    on_episode: Callable[[EpisodeResult], None] = lambda episode: None,
) -> EvaluationResult:
    """Replay the walkthrough of every task of a panel, in two processes.

    Args:
        panel: the tasks.
        env_config: keyword arguments of the environment; the panel's split replaces the one in it.
        on_episode: told of every episode as it ends, in any order.

    Returns:
        The episodes in the order of the panel.

    Raises:
        InfrastructureError: no episode ended within the deadline.
        trial_envs.errors.TrialEnvError: the environment cannot be made, or a game is broken.
    """
    keywords = {**env_config, "split": panel.split}
    finished: dict[str, EpisodeResult] = {}
    context = multiprocessing.get_context("spawn")  # the game engine's library must not be shared by a fork
    with context.Pool(min(PROCESSES, len(panel)), _make_environment, (panel.env_id, keywords)) as pool:
        episodes = pool.imap_unordered(_play, panel.task_ids)
        for _ in panel.task_ids:
            try:
                episode = episodes.next(timeout=EPISODE_DEADLINE_S)
            except multiprocessing.TimeoutError:
                raise InfrastructureError(
                    f"No oracle episode ended within {EPISODE_DEADLINE_S:.0f} s ({len(finished)} of {len(panel)} had)."
                ) from None
            finished[episode.task_id] = episode
            on_episode(episode)
    protocol = {**panel.protocol(), "max_turns": keywords.get("max_turns")}
    return EvaluationResult(protocol, [finished[task] for task in panel.task_ids], policy="walkthrough oracle")


def _make_environment(env_id: str, keywords: dict[str, Any]) -> None:
    import gymnasium

    import trial_envs

    global _env
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends its workers
    trial_envs.register()
    _env = gymnasium.make(env_id, **keywords, disable_env_checker=True)


def _play(task_id: str) -> EpisodeResult:
    from trial_envs.alfworld.oracle import WalkthroughOracle

    oracle = WalkthroughOracle()
    observation, info = _env.reset(options={"task": task_id})
    oracle.reset(_env.unwrapped.walkthrough)
    turns, terminated, truncated = 0, False, False
    while not (terminated or truncated):
        action = oracle.act(observation, info["admissible_actions"])
        observation, _, terminated, truncated, info = _env.step(action)
        turns += 1
    return EpisodeResult(
        task_id=task_id,
        family=info["family"],
        success=bool(info["won"]),
        score=float(info["score"]),
        turns=turns,
        ended="terminated" if terminated else "turn_limit",
    )
