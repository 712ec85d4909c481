"""GRPO: every token of a rollout gets the rollout's advantage over the others of its task, and nothing else."""

from trial_ray.algorithms.config import GRPOConfig

CONFIG = GRPOConfig
