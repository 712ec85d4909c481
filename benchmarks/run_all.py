"""Every benchmark, or those named, one after the other; JSON goes to ``benchmarks/results``.

    python benchmarks/run_all.py [alfworld webshop ...]

Data sets and recordings that stand beside the repository (``../shared``), or that ``ALFWORLD_DATA`` points to, are used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared"


def alfworld_settings() -> list[str]:
    data = os.environ.get("ALFWORLD_DATA") or SHARED / "data" / "alfworld"
    golden = SHARED / "golden" / "alfworld_episodes.jsonl.xz"
    given = {"--data": Path(data), "--golden": golden}
    return [word for option, path in given.items() if path.exists() for word in (option, str(path))]


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    further = {"alfworld": alfworld_settings()}
    for name in names:
        target = HERE / "results" / f"{name}.json"
        print(f"bench_{name}.py → {target}", flush=True)
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--json", str(target), *further.get(name, [])]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
