"""ScienceWorld's tasks: what the trainer knows of ``trial/ScienceWorld-v0``."""

from __future__ import annotations

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.templates import TaggedTemplate

ADAPTER = EnvironmentAdapter(
    env_id="trial/ScienceWorld-v0",
    title="ScienceWorld",
    templates={
        "tagged": TaggedTemplate("You are an agent who carries out science experiments in a house described in text.")
    },
    own_process=True,
)
