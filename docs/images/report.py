"""Makes the pictures of docs/runs.md in headless Chromium.

python docs/images/report.py runs/trial-0 runs/trial-1 runs/grpo-0 runs/grpo-1
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1] / "tests/support"))
COLOURS = 256
"""Of a picture, which a page of flat colours does not need more of."""
VIEWS = {
    "light": {"width": 1200, "height": 1500},
    "dark": {"width": 1200, "height": 1500, "dark": True, "section": "hindsight"},
    "narrow": {"width": 390, "height": 1500},
}


def main(runs: list[Path]) -> None:
    """Write report-light.png, report-dark.png and report-narrow.png beside this file."""
    from chromium import Chromium

    from trial_ray.files import write_text
    from trial_ray.reports.page import load_groups, report_page

    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        page = write_text(Path(folder, "report.html"), report_page(load_groups(runs), f"{len(runs)} runs"))
        for name, view in VIEWS.items():
            browser.look(view["width"], view["height"], dark=view.get("dark", False))
            browser.open(page.as_uri(), "document.readyState === 'complete'")
            if "section" in view:
                browser.evaluate(f"document.getElementById('{view['section']}').scrollIntoView()")
            path = browser.screenshot(FOLDER / f"report-{name}.png")
            image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
            image.quantize(COLOURS).save(path, optimize=True)
            print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
