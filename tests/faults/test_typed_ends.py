"""A run on a full disk stops with a typed error, and continues when there is space."""

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import ChanceEnv, config_of, train
from user_env import registered

from trial_ray.cli import console as terminal
from trial_ray.errors import StorageError
from trial_ray.runs.checkpoints import list_checkpoints, require_whole
from trial_ray.runs.folder import RunFolder

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]
SIZE = 24 << 20
LEFT = (0, 256 << 10)
"""Free bytes that are too few for the next write of anything, and of a checkpoint."""


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(ChanceEnv):
        yield


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of :data:`SIZE` bytes, and return its path."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, text=True, timeout=30
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def fill(disk: Path, left: int) -> None:
    """Fill the file system up to this number of free bytes."""
    free = shutil.disk_usage(disk).free
    with open(disk / "filler", "wb") as file:
        file.write(bytes(free - left))


def test_a_full_disk_stops_a_run_which_continues_when_there_is_space(small_disk, model_path, capsys):
    folder = small_disk / "run"
    reached = 1
    for left in LEFT:
        printed = io.StringIO()
        filled_at = reached + 2

        def fill_up(metrics, filled_at=filled_at, left=left):
            if metrics["training_iteration"] == filled_at:
                fill(small_disk, left)

        console = Console(file=printed, width=300)
        with pytest.raises(StorageError) as stopped:
            train(folder, model_path, 100, resume=folder.exists(), console=console, on_iteration=fill_up)
        assert terminal.report(stopped.value, verbose=False) == terminal.FAILED
        assert f"continue with --resume {folder}" in capsys.readouterr().err
        (small_disk / "filler").unlink()
        newest = list_checkpoints(folder / "checkpoints")[-1]
        require_whole(newest)
        assert filled_at - 2 <= int(newest.name) <= filled_at + 1
        assert f"last checkpoint: {newest}" in printed.getvalue()
        reached = int(newest.name)
    train(folder, model_path, reached + 2, resume=True, config=config_of(model_path))
    assert RunFolder.reopen(folder).state() == "done"
    numbers = [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, reached + 3))
    require_whole(list_checkpoints(folder / "checkpoints")[-1])
