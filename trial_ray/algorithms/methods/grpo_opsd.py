"""GRPO+OPSD as released: SDAR with a gate of slope 0, so that every token is reinforced by the same half of μ.

The teacher's log-probabilities are computed and logged, but **they do not reach the gradient**: σ(0 · δ) = ½ whatever δ is.
"""

from __future__ import annotations

from trial_ray.algorithms.methods.sdar import SDARConfig
from trial_ray.config.declare import setting
from trial_ray.errors import ConfigError


class GRPOOPSDConfig(SDARConfig):
    """SDAR's settings, with ``gate_slope`` 0."""

    gate_slope: float = setting(0.0)

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        if self.gate_slope != 0:
            raise ConfigError(f"gate_slope is {self.gate_slope}, but GRPO+OPSD as released is SDAR with 0; use sdar.")


CONFIG = GRPOOPSDConfig
