"""The paper's tables and figures from scratch: which runs they need, their execution, and what is made of them."""

from trial_ray.reproduction.scale import Choice, EvaluationSet, Scale, load_scale, scale_names
from trial_ray.reproduction.studies import STUDIES, PlannedRun, Study, choose, plan_choice, plan_runs

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
