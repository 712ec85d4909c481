"""Evaluation on fixed panels: results, intervals, paired comparison, and the oracle that bounds them."""

from trial_ray.evaluation.comparison import ComparisonError, PairedComparison, paired_comparison
from trial_ray.evaluation.intervals import wilson_interval
from trial_ray.evaluation.panel import Panel
from trial_ray.evaluation.results import EpisodeResult, EvaluationResult, Rate

__all__ = [
    "ComparisonError",
    "EpisodeResult",
    "EvaluationResult",
    "PairedComparison",
    "Panel",
    "Rate",
    "paired_comparison",
    "wilson_interval",
]
