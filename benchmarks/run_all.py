"""Every benchmark, one after the other; JSON goes to ``benchmarks/results``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    data = os.environ.get("ALFWORLD_DATA")
    further = {"bench_alfworld": ["--data", data] if data else []}
    for script in sorted(HERE.glob("bench_*.py")):
        target = HERE / "results" / f"{script.stem.removeprefix('bench_')}.json"
        print(f"{script.name} → {target}", flush=True)
        subprocess.run([sys.executable, str(script), "--json", str(target), *further.get(script.stem, [])], check=True)


if __name__ == "__main__":
    main()
