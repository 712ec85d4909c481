"""The paper's tables and figures from scratch: which runs they need, their execution, and what is made of them."""

from trial_ray.reproduction.studies import (
    STUDIES,
    Choice,
    EvaluationSet,
    PlannedRun,
    Scale,
    Study,
    choose,
    load_scale,
    plan_choice,
    plan_runs,
    scale_names,
)

__all__ = [
    "STUDIES",
    "Choice",
    "EvaluationSet",
    "PlannedRun",
    "Scale",
    "Study",
    "choose",
    "load_scale",
    "plan_choice",
    "plan_runs",
    "scale_names",
]
