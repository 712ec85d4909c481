"""Trajectory groups with random responses, for tests that need no environment."""

from dataclasses import replace

import numpy as np

from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

OUTCOMES = ("You pick up the apple 1 from the cabinet 2.", "Nothing happens.", "On the shelf 1, you see a mug 3.")


def synthetic_groups(vocab_size=400, num_groups=3, group_size=4, seed=0, max_turns=4, responses=()):
    """Return groups of rollouts; each response is one of ``responses``, or random tokens."""
    rng = np.random.default_rng(seed)

    def trajectory(task, rollout):
        turns = [_turn(rng, vocab_size, responses) for _ in range(rng.integers(1, max_turns + 1))]
        success = bool(rng.random() < 0.5)
        ended = "terminated" if success else "turn_limit"
        return Trajectory(task, "pick", rollout, turns, success, float(success), ended, solution=("look", "wait"))

    tasks = [f"task-{group}" for group in range(num_groups)]
    return [TrajectoryGroup(task, [trajectory(task, rollout) for rollout in range(group_size)]) for task in tasks]


def changed(groups, change):
    """Return the groups with other fields of their turns: ``change`` gets a turn and its index in the rollout."""
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.turns = [replace(turn, **change(turn, index)) for index, turn in enumerate(trajectory.turns)]
    return groups


def _turn(rng, vocab_size, responses):
    prompt, response = (
        rng.integers(10, vocab_size, rng.integers(*lengths)).astype(np.int32) for lengths in ((6, 20), (1, 6))
    )
    if responses:
        response = responses[rng.integers(len(responses))]
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=np.full(len(response), -5.0, np.float32),
        weight_version=1,
        insert_at=len(prompt) - 1,
        observation="You are in the middle of a room.",
        action="look",
        valid=bool(rng.random() < 0.8),
        outcome=str(rng.choice(OUTCOMES)),
    )
