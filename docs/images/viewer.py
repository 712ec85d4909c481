"""The pictures of docs/runs.md: the page of two invented runs in headless Chromium.

python docs/images/viewer.py        # viewer-light.png, viewer-dark.png, viewer-narrow.png
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from chromium import Chromium
from PIL import Image
from synthetic_run import REASONS, make_run

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.models.tiny import build_tokenizer
from trial_ray.reports.viewer import write_viewer
from trial_ray.runs.reader import open_run

HERE = Path(__file__).parent
WORDS = "think action household chores described household middle Looking quickly around arrive nothing happens"
SETTLED_S = 0.3
"""Seconds in which a page that was changed is painted again."""


def main() -> None:
    """Write the pictures."""
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary, [f"{' '.join(REASONS)} {WORDS}"] * 2)
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        runs = []
        for seed, name in enumerate(("grpo", "trial")):
            runs.append(open_run(make_run(Path(folder) / name, tokenizer, 160, seed=seed), name))
        page = write_viewer(runs, Path(folder) / "viewer").page.as_uri()
        light(browser, page)
        dark(browser, page)
        narrow(browser, page)


def light(browser: Chromium, page: str) -> None:
    """One trajectory, a token under the mouse."""
    browser.look(1400, 940)
    show(browser, f"{page}#164.1")
    browser.hover("article .tokens .strong:nth-child(n + 6)")
    save(browser, "light")


def dark(browser: Chromium, page: str) -> None:
    """Two runs on one task."""
    browser.look(1400, 940, dark=True)
    show(browser, f"{page}#8.1")
    browser.press("h")
    browser.press("c")
    browser.wait("document.querySelectorAll('.head').length === 2")
    save(browser, "dark")


def narrow(browser: Chromium, page: str) -> None:
    """A phone."""
    browser.look(390, 1500)
    show(browser, f"{page}#164.1")
    save(browser, "narrow")


def show(browser: Chromium, address: str) -> None:
    """Load the page again, also where the address differs in its last part alone."""
    browser.open("about:blank", "true")
    browser.open(address)
    browser.wait("document.querySelector('article.current')")


def save(browser: Chromium, name: str) -> None:
    """Write one picture."""
    time.sleep(SETTLED_S)
    path = browser.screenshot(HERE / f"viewer-{name}.png")
    # A page of a few colours and their mixtures: a palette halves the file.
    Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
