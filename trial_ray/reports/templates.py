"""Templates of the report and of a trajectory in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"


def render(name: str, **values: Any) -> str:
    """Render a template with values, which are escaped in HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    html = name.endswith(".html.jinja")
    loader = FileSystemLoader(ASSETS)
    environment = Environment(
        loader=loader, autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name).render(values)
