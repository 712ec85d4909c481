"""The paper's tables and figures from scratch: which runs they need, their execution, and what is made of them."""

from trial_ray.reproduction.plan import STUDIES, PlannedRun, Study, plan_runs
from trial_ray.reproduction.scale import EvaluationSet, Scale, load_scale, scale_names

__all__ = ["STUDIES", "EvaluationSet", "PlannedRun", "Scale", "Study", "load_scale", "plan_runs", "scale_names"]
