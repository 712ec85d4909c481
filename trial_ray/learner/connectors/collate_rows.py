"""Last piece: turn rows as the padded columns that RLlib cuts into minibatches."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID

from trial_ray.learner.connectors.group_advantages import TURN_ROWS


class CollateRows(ConnectorV2):
    """Move the finished rows into the train batch, on the learner's device."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.device = device

    def __call__(self, *, batch: dict[str, Any], shared_data: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the batch with one column per field, the turn on axis 0."""
        columns = shared_data.pop(TURN_ROWS).columns()
        batch[DEFAULT_MODULE_ID] = {name: column.to(self.device) for name, column in columns.items()}
        return batch
