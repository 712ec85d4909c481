"""The check of the built site finds whatever a page would load from elsewhere, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "docsite" / "offline.py"


@pytest.fixture(scope="module")
def offline():
    spec = importlib.util.spec_from_file_location("offline", CHECK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.html", '<script src="https://cdn.example/a.js"></script>'),
        ("page.html", '<script src="//cdn.example/a.js"></script>'),
        ("page.html", "<script>import('https://unpkg.com/mermaid@11')</script>"),
        ("page.html", '<link rel="stylesheet" href="http://fonts.example/css?family=Roboto">'),
        ("page.html", '<link rel="preconnect" href="https://fonts.gstatic.com">'),
        ("page.html", "<style>@import url('https://fonts.example/a.css')</style>"),
        ("page.html", '<p style="background: url(https://pictures.example/a.png)">'),
        ("page.html", '<img src="https://badges.example/build.svg">'),
        ("page.html", '<img srcset="a.png 1x, https://pictures.example/a.png 2x">'),
        ("style.css", '@import "https://fonts.example/a.css";'),
        ("style.css", "@font-face { src: url(https://fonts.example/a.woff2) }"),
        ("script.js", 'load("https://host.example/katex.min.js")'),
        ("script.js", 'load("https://cdn.jsdelivr.net/npm/katex")'),
        ("picture.svg", '<svg><image href="https://pictures.example/a.png"/></svg>'),
    ],
)
def test_what_comes_from_elsewhere_is_found(offline, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (found,) = offline.remote_references(tmp_path)
    assert found.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.html", '<a href="https://docs.ray.io/x.js">Ray</a> <script src="assets/a.js"></script>'),
        ("page.html", '<link rel="canonical" href="https://example.com/"> <code>https://unpkg.com/a.js</code>'),
        ("page.html", "<script>var address = 'https://api.github.com/repos/'</script>"),
        ("style.css", "a { background: url(../images/a.png) } /* https://fonts.example/license */"),
        (
            "script.js",
            '/* https://host.example/a.js */\n// https://host.example/b.js\nlet ns = "http://www.w3.org/2000/svg"',
        ),
        ("picture.svg", '<svg xmlns="http://www.w3.org/2000/svg"><use href="#head"/></svg>'),
    ],
)
def test_links_and_local_files_are_not(offline, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert offline.remote_references(tmp_path) == []
