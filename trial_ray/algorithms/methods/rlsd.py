"""RLSD: each token's advantage is rescaled according to the ratio of the token's probabilities under teacher and policy.

Â_t = A · [(1 − λ) + λ · clip(exp(sgn(A) · δ_t), 1 ± ε)], δ = log π_T(y|h⁺) − log π_old(y|h). The teacher's prompt h⁺ is the prompt
h with the teacher context; λ is the strength of the rescaling, and ε its bound. Advantages of 0 stay 0.
"""

from __future__ import annotations

import torch

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.config.declare import setting
from trial_ray.learner.method import Method, Metrics, linear_decay, per_token
from trial_ray.learner.rows import TokenBatch, TurnRows, required
from trial_ray.objectives.advantages import rescaled_advantages
from trial_ray.trajectory import TrajectoryGroup


class RescaledAdvantages(Method["RLSDConfig"]):
    """Rescales the advantage of each token by a factor that depends on δ, the teacher's log-ratio of the token.

    δ is the token's log-probability under the teacher minus its log-probability under π_old, the policy before the update. The
    strength λ of the rescaling decreases linearly with the iterations until it is 0.
    """

    name = "rlsd"
    needs_teacher_context = True

    def prepare(self, rows: TurnRows, groups: list[TrajectoryGroup], iteration: int) -> Metrics:
        """Log λ and the mean hindsight log-ratio."""
        gap = required(rows.hindsight_logprobs) - rows.logprobs
        return {"rescaling": torch.tensor(self.strength(iteration)), "gap_mean": gap.mean()}

    def strength(self, iteration: int) -> float:
        """Return the rescaling strength λ; as in RLSD's released code, iteration 1 uses less than the initial value."""
        return linear_decay(self.config.rescaling, self.config.rescaling_iterations, iteration + 1)

    @per_token
    def token_advantages(self, tokens: TokenBatch, logprobs: torch.Tensor, iteration: int) -> torch.Tensor:
        """Return the rescaled advantage Â of every token, ``[T]``."""
        gap = required(tokens.hindsight_logprobs) - tokens.old_logprobs
        return rescaled_advantages(tokens.advantages, gap, self.strength(iteration), self.config.rescaling_clip)


class RLSDConfig(GRPOConfig):
    """RLSD with the settings of its released code: the teacher is the policy with advice on the task in its prompt."""

    method_class = RescaledAdvantages

    teacher_context: str | None = setting("skill")
    rescaling: float = setting(0.5, "λ before it falls, by equal steps", within=(0, 1))
    rescaling_iterations: int = setting(100, "steps until λ is 0", at_least=1)
    rescaling_clip: float = setting(0.2, "ε, the bound of the rescaling", within=(0, 1))

    def schedules(self) -> dict[str, int]:
        """Return the number of iterations until the strength λ is 0; without rescaling, there is no schedule."""
        return {"rescaling_iterations": self.rescaling_iterations} if self.rescaling else {}
