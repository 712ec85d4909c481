"""Rollouts: env runners play groups of episodes, with responses from the inference engines.

In reading order:

- ``groups``: requests to play a group of rollouts, summaries of played groups, and sums over rollouts for metrics.
- ``episode``: the episode loop, the player that samples turns from the policy, and the order in which waiting groups start.
- ``env_runner``: the actor that plays groups.
- ``runner_group``: RLlib's group of env runners, and env runners that are added during a run.
- ``env_runner_pool``: sends groups to env runners, receives them, and replaces lost env runners.
- ``callbacks``: the user's callbacks and reward function on an env runner.
- ``recording``: trajectories as Parquet files, in a folder per iteration.
"""
