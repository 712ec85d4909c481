"""The objective as pure functions of flat tensors. Equation numbers are the TRIAL paper's; ``docs/methods.md`` lists them.

This module has the names of the objective's variants and the comparison of rewards, and does not import torch.

- ``advantages``: returns, group-relative advantages (Eq. 1), advantages of RLOO and MaxRL, penalties, RLSD's token advantages.
- ``allocation``: hindsight log-ratios (Eq. 4), turn scores (Eq. 5) and turn weights (Eq. 6).
- ``losses``: the surrogates of PPO, CISPO and SAPO, the dense hindsight loss (Eq. 7), the joint loss (Eq. 8), GSPO's ratio
  of a whole response, the ways in which GRPO and Dr. GRPO average token losses over responses, and importance weights for the
  mismatch between the engine's policy and the learner's.
- ``divergences``: KL estimate k3, differences between the learner's and the engine's policy, Jensen-Shannon divergence.
- ``shaping``: gate, scale and bound of the terms that ADRS (arXiv 2608.03223) adds to advantages.
- ``segments``: sums and standardised values over segments, argument checks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

if TYPE_CHECKING:
    from torch import Tensor

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_MODES: tuple[ImportanceMode, ...] = get_args(ImportanceMode)
AdvantageEstimator = Literal["group", "rloo", "max_rl"]
ADVANTAGE_ESTIMATORS: tuple[AdvantageEstimator, ...] = get_args(AdvantageEstimator)
PolicyLoss = Literal["clip", "cispo", "sapo"]
RatioLevel = Literal["token", "sequence"]
SurrogateMean = Literal["tokens", "rows", "fixed_length"]
SURROGATE_MEANS: tuple[SurrogateMean, ...] = get_args(SurrogateMean)


ROUNDING = 1e-6
"""Relative error up to which rewards count as equal: float32, which many environments use, keeps seven digits, and sums of the
same rewards in another order differ in the last digit."""


@overload
def equal_up_to_rounding(first: float, second: float) -> bool: ...
@overload
def equal_up_to_rounding(first: Tensor, second: Tensor) -> Tensor: ...
def equal_up_to_rounding(first: Any, second: Any) -> Any:
    """Return whether two rewards (numbers or tensors of one shape) are equal up to rounding.

    Each reward may have a relative error of :data:`ROUNDING`. NaN and infinities are not equal to anything.
    """
    distance = abs(second - first)
    return (distance <= ROUNDING * abs(first) + ROUNDING * abs(second)) & (distance < math.inf)
