"""A server of the text environments for OpenEnv clients: ``python -m trial_envs.openenv trial/ALFWorld-v0``."""
