"""Reports of runs: one HTML page, figures, a viewer of trajectories, and text for the terminal.

- :mod:`~trial_ray.reports.page`: the HTML page of a report, and its tables as rows of cells
- :mod:`~trial_ray.reports.groups`: runs that differ only in their seed
- :mod:`~trial_ray.reports.charts`: the numbers and texts of charts
- :mod:`~trial_ray.reports.plots`: drawings of charts by matplotlib
- :mod:`~trial_ray.reports.viewer`: trajectories as an interactive page, and in the terminal

This module has :func:`render`, which renders the templates of pages and of terminal output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"


def render(name: str, **values: Any) -> str:
    """Render a template of :data:`ASSETS` and return the text; values are escaped in HTML templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    html = name.endswith(".html.jinja")
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader, autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(values)
