"""Scoring piece: log π_old(y|h) and, where the method uses them, log π_T(y|h⁺) and the reference's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.errors import WeightSyncError
from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.learner.connectors.plan_rows import UPDATE_PLAN
from trial_ray.learner.exchange import LearnerExchange
from trial_ray.learner.packing import Row, score_rows
from trial_ray.learner.turn_rows import TurnRows
from trial_ray.models.causal_lm_module import CausalLMModule
from trial_ray.objectives.divergences import engine_divergences

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


class ScoreRows(ConnectorV2):
    """Score every response under the policy before the update: both views by the same weights, kernel and precision.

    With a lagged teacher, the privileged view is scored by the teacher instead. Each learner scores its share of the
    trajectories, then all have the scores of all.

    The learner's numbers, not the engine's, are the old log-probabilities. How far the engine's are from them is logged,
    and above ``max_logprob_gap`` nothing is trained: the engine then sampled from another policy.
    """

    def __init__(self, config: AlgorithmConfig, exchange: LearnerExchange) -> None:
        super().__init__()
        self.config = config
        self.exchange = exchange

    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        shared_data: dict[str, Any],
        metrics: MetricsLogger,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill the log-probabilities of the rows in ``shared_data``.

        Raises:
            WeightSyncError: engine and learner disagree on the sampled tokens.
        """
        rows = shared_data[TURN_ROWS]
        module = rl_module[DEFAULT_MODULE_ID].unwrapped()
        share = shared_data[UPDATE_PLAN].scoring[self.exchange.rank]
        with module.autocast():
            scores = self._score(module, rows.model_rows(share, with_evidence=bool(rows.evidence_ids)))
        for name, values in self._exchanged(rows, share, scores, module.lm.dtype).items():
            setattr(rows, name, values)
        self._compare_with_engine(rows, metrics)
        return batch

    def _score(self, module: CausalLMModule, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Flat log-probabilities of the share's response tokens by the name of their field in :class:`TurnRows`."""
        options = {"max_tokens": self.config.max_tokens_per_forward, "temperature": self.config.temperature}
        privileged = self.config.privileged_view is not None
        logprobs, hindsight = score_rows(module.lm, rows, two_views=privileged and module.teacher is None, **options)
        scores = {"logprobs": logprobs}
        if module.teacher is not None:
            hindsight, _ = score_rows(module.teacher, [row.hindsight_row for row in rows], two_views=False, **options)
        if hindsight is not None:
            scores["hindsight_logprobs"] = hindsight
        if module.reference is not None:
            scores["reference_logprobs"], _ = score_rows(module.reference, rows, two_views=False, **options)
        return scores

    def _exchanged(
        self, rows: TurnRows, share: np.ndarray, scores: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """All learners' scores, each ``[T]`` on the CPU; every token was scored by one of them."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        places = rows.token_places(share)
        whole = {name: torch.zeros(int(rows.lengths.sum()), dtype=wide) for name in scores}
        for name, values in scores.items():
            whole[name][places] = values.to("cpu", wide)
        self.exchange.add_up(list(whole.values()))
        return whole

    def _compare_with_engine(self, rows: TurnRows, metrics: MetricsLogger) -> None:
        """Log how far the engine's log-probabilities are from the learner's; refuse to train where they are another's."""
        behaviour = torch.from_numpy(np.concatenate([turn.logprobs for turn in rows.turns])).to(rows.logprobs.dtype)
        found = engine_divergences(rows.logprobs, behaviour)
        for name, value in found.items():
            reduce = "max" if name.endswith("max") else "mean"
            metrics.log_value((DEFAULT_MODULE_ID, "engine", name), value.item(), reduce=reduce)
        gap, limit = found["logprob_gap"].item(), self.config.logprob_gap_limit()
        if not gap <= limit:  # NaN too
            raise WeightSyncError(
                f"Engine and learner disagree by {gap:.3g} nats a token on average (expected at most {limit:g}, "
                "max_logprob_gap): the engine sampled from another policy than the one that is trained, so nothing was "
                "trained on its responses. Check that both use the same dtype and temperature, and that the engine supports "
                "reloading this model's weights."
            )
