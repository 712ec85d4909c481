"""A report as one HTML page that loads nothing: a template that escapes, charts by Plotly.js, a strict content security policy."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trial_ray.files import finite

ASSETS = resources.files("trial_ray.reports") / "assets"
LIBRARY = "package_data/plotly.min.js"
"""Inside the Python package ``plotly``, of which nothing else is used."""
# Plotly.js adds its style rules one by one to an empty style sheet, which the hash of no text allows.
NO_TEXT = ""


def render_page(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        content: what ``assets/report.html.jinja`` shows; all of it is escaped.
        data: what ``assets/report.js`` draws; JSON values.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style, script, library = _asset("report.css"), _asset("report.js"), plotly_source()
    scripts = [script, library] if library else []
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_asset("report.html.jinja"))
    return template.render(
        **content,
        policy=content_security_policy(scripts, [style, NO_TEXT]),
        style=Markup(style),
        script=Markup(script),
        data=Markup(json_for_html(data)),
        library=Markup(_compressed(library)) if library else "",
    )


def content_security_policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Nothing is loaded or sent, and no script or style sheet counts but these. Charts are saved as images of the page's own."""
    script_hashes = " ".join(_hash(text) for text in scripts) or "'none'"
    style_hashes = " ".join(_hash(text) for text in styles)
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src {style_hashes}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def json_for_html(value: Any) -> str:
    """JSON that no text inside it can end: the characters that HTML knows are written as escapes; null for NaN and infinity."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def plotly_source() -> str:
    """The library's code, out of the Python package; empty where that is not installed."""
    # Found without importing the package, which would bring in much that is not needed.
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / LIBRARY if spec and spec.origin else None
    return path.read_text(encoding="utf-8") if path and path.is_file() else ""


@cache
def _compressed(source: str) -> str:
    """Text that the page unpacks, a third of the library's size; the same bytes every time."""
    return base64.b64encode(gzip.compress(source.encode(), compresslevel=9, mtime=0)).decode()


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
