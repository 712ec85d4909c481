"""Rollouts: env runners play groups of episodes, with responses of the engines.

In reading order:

- ``groups``: requests, samples and counts of groups of rollouts.
- ``episode``: the episode loop, and the player that asks a policy.
- ``env_runner``: the actor that plays groups.
- ``slots``: the order in which the groups of an env runner start.
- ``runner_group``: RLlib's group of env runners.
- ``env_runner_pool``: sends groups to env runners, receives them, and replaces lost env runners.
- ``new_runners``: env runners that join while a run goes on.
- ``callbacks``: the user's callbacks on an env runner.
- ``rewards``: the user's reward function.
- ``recording``: trajectories as Parquet files.
- ``partitions``: Parquet files in a folder per iteration.
"""
