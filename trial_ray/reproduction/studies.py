"""What each table and figure compares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Study:
    """One table or figure of the paper.

    Attributes:
        title: what it shows.
        methods: rows or curves, in the paper's order.
        controlled: only the scale's controlled backbone is trained; otherwise every backbone.
        environments: only these of the scale's; ``None`` takes all.
    """

    title: str
    methods: tuple[str, ...]
    controlled: bool = True
    environments: tuple[str, ...] | None = None


STUDIES = {
    "table2": Study(
        "complete-set results of all methods", ("grpo", "serl", "sdar", "grpo_opsd", "rlsd", "trial"), controlled=False
    ),
    "table3": Study("controlled revision profiles", ("grpo", "uniform", "permuted", "trial")),
    "figure2": Study("validation and allocation dynamics", ("grpo", "trial"), environments=("alfworld",)),
    "figure3": Study(
        "allocation over a trajectory, and two policies on one game", ("grpo", "trial"), environments=("alfworld",)
    ),
}
"""By the name that ``trial-ray reproduce`` takes; runs are shared between them."""
