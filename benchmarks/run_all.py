"""Every benchmark, or those named, one after the other; JSON goes to ``benchmarks/results``.

    python benchmarks/run_all.py [alfworld webshop ...]

Third-party data sets and recordings are used where ``TRIAL_TEST_DATA`` (see CONTRIBUTING.md), or ``ALFWORLD_DATA``, points to them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
THIRD_PARTY = Path(os.environ.get("TRIAL_TEST_DATA", "third-party data not given"))


def alfworld_settings() -> list[str]:
    data = os.environ.get("ALFWORLD_DATA") or THIRD_PARTY / "data" / "alfworld"
    golden = THIRD_PARTY / "golden" / "alfworld_episodes.jsonl.xz"
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
