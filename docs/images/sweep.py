"""Makes sweep.png of the map that a sweep leaves.

trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --iterations 4 --out sweeps/gallery
python docs/images/sweep.py sweeps/gallery
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

COLOURS = 256
"""Of a picture, which needs no more of flat colours."""


def main(sweep: Path) -> None:
    """Write sweep.png beside this file."""
    path = Path(__file__).parent / "sweep.png"
    Image.open(sweep / "map.png").convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(path, f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
