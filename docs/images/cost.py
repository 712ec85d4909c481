"""Makes cost.png of a report's section on time and cost, in headless Chromium.

trial-ray train tuned_examples/alfworld_quickstart.py --iterations 2 --set evaluation_num_tasks=8 --out runs/gallery
python docs/images/cost.py runs/gallery
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1] / "tests/support"))
from chromium import Chromium  # noqa: E402

from trial_ray.runs.reader import load_groups, write_report  # noqa: E402

COLOURS = 256
"""Of a picture, which needs no more of flat colours."""
SECTION = "#time"


def main(run: Path) -> None:
    """Write cost.png beside this file."""
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        page = write_report(load_groups([run]), run.name, Path(folder, "report.html"))
        browser.look(900, 1500)
        browser.open(page.as_uri(), "document.readyState === 'complete'")
        box = browser.evaluate(
            f"(() => {{ const section = document.querySelector({json.dumps(SECTION)}); section.scrollIntoView();"
            " const b = section.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })()"
        )
        picture = Image.open(io.BytesIO(browser.screenshot(Path(folder, "page.png")).read_bytes()))
        path = FOLDER / "cost.png"
        picture.crop([round(edge) for edge in box]).convert("RGB").quantize(COLOURS).save(path, optimize=True)
        print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
