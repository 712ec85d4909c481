"""Makes viewer-pretrained.png: one trajectory of a pretrained model, tokens tinted by their hindsight gap, in headless Chromium.

trial-ray sweep pair --scale pretrained --out runs/pair
python docs/images/pretrained.py runs/pair/alfworld-smollm2-135m-trial-seed0 222
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from chromium import Chromium
from viewer import save, show

from trial_ray.reports.viewer import write_viewer
from trial_ray.runs.reader import open_run


def main(run: Path, trajectory: int) -> None:
    """Write the picture.

    Args:
        run: its folder.
        trajectory: its place in the page's list, from 0.
    """
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        page = write_viewer([open_run(run, run.name)], Path(folder) / "viewer").page.as_uri()
        browser.look(1100, 1300)
        show(browser, f"{page}#{trajectory}.1")
        browser.evaluate("document.getElementById('prompts').click()")
        save(browser, "pretrained")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
