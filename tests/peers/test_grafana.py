"""Grafana's own types have every field of the dashboard; tests/runs/test_ray_metrics.py checks its queries."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "cluster/grafana.json").read_text())


def test_grafanas_types_have_every_field_of_the_dashboard():
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    written = encoder.JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD))
    assert lost(DASHBOARD, json.loads(written)) == []


def lost(before, after, path=""):
    """Return the paths whose values in ``before`` are missing or different in ``after``."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key in before for each in lost(before[key], after.get(key, "is missing"), f"{path}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for i, pair in enumerate(zip(before, after, strict=True)) for each in lost(*pair, f"{path}/{i}")]
    return [] if before == after else [f"{path}: {before!r}, {after!r}"]
