"""The sizes that make lint holds the repository to."""

from __future__ import annotations

import sys

import code_size
import pytest


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for folder in ("trial_ray", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trial_ray" / "small.py").write_text('"""Not counted."""\n\nx = 1  # nor this\n')
    (tmp_path / "README.md").write_text("three words here\n")
    monkeypatch.setattr(code_size, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch, *limits):
    monkeypatch.setattr(sys, "argv", ["code_size.py", "--most", *limits])
    code_size.main()


def test_what_is_within_its_limits_passes(repository, monkeypatch):
    run(monkeypatch, "trial_ray=3", "words=3")


def test_each_excess_is_named_with_its_size_and_limit(repository, monkeypatch):
    (repository / "trial_ray" / "long.py").write_text("\n" * 451)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "trial_ray=2", "words=1")
    tokens, words, lines = stop.value.code.splitlines()
    assert tokens.startswith("trial_ray has 3 tokens, 1 more than the 2 ")
    assert words.startswith("README and docs have 3 words, 2 more than the 1 ")
    assert lines.startswith("trial_ray/long.py has 451 lines, expected at most 450")
