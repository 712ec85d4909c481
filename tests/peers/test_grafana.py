"""Grafana's own types have every field of the dashboard; tests/runs/test_ray_metrics.py checks its queries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "cluster" / "grafana.json").read_text(encoding="utf-8"))


def test_grafanas_types_have_every_field_of_the_dashboard():
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    written = encoder.JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD))
    assert lost(DASHBOARD, json.loads(written)) == []


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths whose values in ``before`` are missing or different in ``after``."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key in before for each in lost(before[key], after.get(key, "is missing"), f"{path}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for i, pair in enumerate(zip(before, after, strict=True)) for each in lost(*pair, f"{path}/{i}")]
    return [] if before == after else [f"{path}: {before!r}, {after!r}"]
