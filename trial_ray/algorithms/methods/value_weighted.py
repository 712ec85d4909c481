"""Value-weighted: TRIAL's turn scores times step values before they are normalised (not in the paper; ``learner.step_values``)."""

from __future__ import annotations

from trial_ray.algorithms.methods.trial import TRIALConfig
from trial_ray.config.declare import setting


class ValueWeightedConfig(TRIALConfig):
    """TRIAL's settings and defaults, with ``value_weighting``."""

    value_weighting: bool = setting(True)


CONFIG = ValueWeightedConfig
