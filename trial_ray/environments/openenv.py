"""Environments on servers of OpenEnv: what the trainer knows of ``trial/OpenEnv-v0``."""

from trial_ray.environments.adapter import EnvironmentAdapter

ADAPTER = EnvironmentAdapter(
    env_id="trial/OpenEnv-v0",
    own_process=True,  # a server that answers slowly must not stop the other episodes
)
