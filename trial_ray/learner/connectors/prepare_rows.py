"""Method piece: what the method fixes on the scored rows before the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.errors import MethodError
from trial_ray.learner.action_spans import action_mask
from trial_ray.learner.connectors.group_advantages import TURN_ROWS
from trial_ray.learner.method import Method
from trial_ray.learner.turn_rows import TurnRows
from trial_ray.rollout.trajectory import TrajectoryGroup


class PrepareRows(ConnectorV2):
    """Let the method look at both views' scores; its profile or advantages are fixed during the update."""

    def __init__(self, method: Method, iteration: Callable[[], int]) -> None:
        super().__init__()
        self.method = method
        self.iteration = iteration

    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[TrajectoryGroup],
        shared_data: dict[str, Any],
        metrics: MetricsLogger,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill what the method needs of the rows in ``shared_data``; log its metrics.

        Raises:
            MethodError: the method gave the rows a field of the wrong shape.
        """
        rows = shared_data[TURN_ROWS]
        if self.method.needs_action_spans:
            tokenizer = rl_module[DEFAULT_MODULE_ID].unwrapped().tokenizer
            responses = [turn.response_ids for turn in rows.turns]
            rows.action_mask = action_mask(responses, tokenizer, self.method.config.prompt_style)
        logged = self.method.prepare(rows, episodes, self.iteration())
        _require_fields(self.method, rows)
        for name, value in logged.items():
            metrics.log_value((DEFAULT_MODULE_ID, self.method.name, name), value.item(), reduce="mean")
        return batch


def _require_fields(method: Method, rows: TurnRows) -> None:
    """Refuse what would be taken for another turn's or token's value."""
    num_tokens = int(rows.lengths.sum())
    for name, size in (("advantages", len(rows)), ("weights", len(rows)), ("mask", num_tokens)):
        values = getattr(rows, name)
        if values is not None and values.shape != (size,):
            raise MethodError(
                f"{type(method).__name__}.prepare must leave rows.{name} with shape [{size}]; found {list(values.shape)}."
            )
