"""A run on a full disk stops with a typed error, and continues when there is space."""

import io
import shutil
import subprocess

import pytest
from cli_fakes import iterations
from commands import completed
from tiny_run import ChanceEnv, config_of, train
from user_env import registered

from trial_ray.cli import console as terminal
from trial_ray.errors import StorageError
from trial_ray.runs.checkpoints import list_checkpoints, require_whole
from trial_ray.runs.folder import RunFolder

SIZE = 24 << 20


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of :data:`SIZE` bytes, and return its path."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = completed(f"mount -t tmpfs -o size={SIZE} tmpfs {folder}".split(), timeout=30)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)


@pytest.mark.parametrize("left", [0, 256 << 10])
@registered(ChanceEnv)
def test_a_full_disk_stops_a_run_which_continues_when_there_is_space(left, ray_session, small_disk, model_path, capsys):
    """There is no room for the next write of anything, or of a checkpoint."""
    folder, filler, printed = small_disk / "run", small_disk / "filler", io.StringIO()

    def fill_up():
        if list_checkpoints(folder / "checkpoints")[-1].name == "000002":
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - left))

    with pytest.raises(StorageError) as stopped:
        train(folder, config_of(model_path), 100, printed=printed, on_checkpoint=fill_up)
    assert terminal.report(stopped.value, verbose=False) == terminal.FAILED
    assert f"continue with --resume {folder}" in capsys.readouterr().err
    filler.unlink()
    newest = list_checkpoints(folder / "checkpoints")[-1]
    require_whole(newest)
    assert f"last checkpoint: {newest}" in printed.getvalue()
    reached = int(newest.name)
    assert 1 <= reached <= 4
    train(folder, config_of(model_path), reached + 2, resume=True)
    assert RunFolder(folder).state() == "done"
    assert iterations(folder) == [*range(1, reached + 3)]
    require_whole(list_checkpoints(folder / "checkpoints")[-1])
