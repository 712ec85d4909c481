"""Configuration of TRIAL: GRPO plus the dense hindsight loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import NotProvided

from trial_ray.algorithms.grpo_config import GRPOConfig
from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

ALLOCATIONS = ("relative", "uniform", "permuted")


class TRIALConfig(GRPOConfig):
    """Trajectory-relative hindsight distillation; the defaults are the paper's ALFWorld column (its Table 1)."""

    def __init__(self, algo_class: type | None = None) -> None:
        if algo_class is None:
            from trial_ray.algorithms.trial import TRIAL

            algo_class = TRIAL
        super().__init__(algo_class=algo_class)
        self.hindsight_coeff = 0.01
        self.hindsight_start_iteration = 25
        self.clamp_alpha = 1.0
        self.gap_clip = 2.0
        self.allocation = "relative"
        self.max_outcome_tokens = 512

    def training(
        self,
        *,
        hindsight_coeff: float = NotProvided,
        hindsight_start_iteration: int = NotProvided,
        clamp_alpha: float = NotProvided,
        gap_clip: float = NotProvided,
        allocation: str = NotProvided,
        max_outcome_tokens: int = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Set the objective and the optimisation; what GRPO shares is documented at ``GRPOConfig.training``.

        Args:
            hindsight_coeff: λ, the weight of the dense hindsight loss once it is active (Eq. 8).
            hindsight_start_iteration: first iteration (counted from 1) at which λ applies; 0 before.
            clamp_alpha: α, the bound of the dense contribution relative to the GRPO loss (Eq. 8).
            gap_clip: c, the elementwise bound on the log-probability gap, in nats (Eq. 4).
            allocation: turn weights: ``"relative"`` (TRIAL, Eq. 6), ``"uniform"`` or ``"permuted"`` (its controls).
            max_outcome_tokens: longest outcome view, in tokens; longer ones are cut and the cut is marked.
        """
        super().training(**kwargs)
        return self._assign(
            hindsight_coeff=hindsight_coeff,
            hindsight_start_iteration=hindsight_start_iteration,
            clamp_alpha=clamp_alpha,
            gap_clip=gap_clip,
            allocation=allocation,
            max_outcome_tokens=max_outcome_tokens,
        )

    def get_default_learner_class(self) -> type:
        """Return the learner that adds the dense hindsight loss."""
        from trial_ray.learner.trial_learner import TRIALLearner

        return TRIALLearner

    @property
    def uses_hindsight(self) -> bool:
        """Whether the method scores hindsight views."""
        return True

    def validate(self) -> None:
        """Check every value; see ``GRPOConfig.validate``."""
        super().validate()
        self._require_at_least(0, "hindsight_coeff", "clamp_alpha")
        self._require_at_least(1, "hindsight_start_iteration", "max_outcome_tokens")
        self._require_one_of("allocation", ALLOCATIONS)
        if self.gap_clip <= 0:
            raise ConfigError(f"gap_clip is {self.gap_clip}, expected a positive bound in nats.")
