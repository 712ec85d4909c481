"""Make the environment for a GPU out of a folder of wheels, without a package index.

    python3.11 benchmarks/gpu_venv.py .venv-gpu/bin/python wheels

All wheels of the folder are installed, without looking at what they require; packages that it lacks come from the Python that
runs this, so that a machine's own torch can serve. Needs Python and pip alone; setuptools is in the folder or with that Python.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps")


def make_venv(python: Path, wheels: Path) -> None:
    """Make the environment whose interpreter is ``python``; where that fails, nothing is left of it.

    Raises:
        SystemExit: says what is wrong and what to do.
    """
    folder = python.parent.parent
    found = sorted(wheels.glob("*.whl"))
    if python.parent.name != "bin" or folder.exists():
        sys.exit(
            f"GPU_PYTHON={python}: expected bin/python of an environment that is there, or of a folder to be made."
        )
    if not found:
        sys.exit(f"WHEELS={wheels}: found no *.whl there; fetch them as docs/installation.md says.")
    try:
        venv.create(folder, system_site_packages=True, with_pip=True)
        subprocess.run([str(python), *PIP, *map(str, found)], check=True)
        subprocess.run([str(python), *PIP, "--no-build-isolation", "--editable", str(ROOT)], check=True)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, subprocess.CalledProcessError):
            sys.exit(f"pip could not install the wheels of {wheels}; its message is above. {folder} was removed.")
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python", type=Path, help="the interpreter to be made, such as .venv-gpu/bin/python")
    parser.add_argument("wheels", type=Path, nargs="?", help="folder of wheels")
    args = parser.parse_args()
    if args.wheels is None:
        sys.exit(
            f"There is no {args.python}. Make it as docs/installation.md says, name another with GPU_PYTHON=/path/to/python, "
            "or give a folder of wheels with WHEELS=DIR."
        )
    make_venv(args.python, args.wheels)


if __name__ == "__main__":
    main()
