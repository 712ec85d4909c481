"""A server of the text environments for clients of OpenEnv: ``python -m trial_envs.openenv trial/ALFWorld-v0``."""
