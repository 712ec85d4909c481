"""Checkpoints written beside training: complete ones have a name, others leave nothing, errors are said at the next step."""

from __future__ import annotations

import threading

import pytest

from trial_ray.errors import CheckpointError, EngineError
from trial_ray.models.folders import DeferredWriter
from trial_ray.runs import checkpoint_writer
from trial_ray.runs.checkpoint_writer import CheckpointWriter
from trial_ray.runs.checkpoints import CHECKPOINT_MARK, list_checkpoints


class SlowAlgorithm:
    """Writes its state's number at once and its weights on the writer's thread, once they may be written."""

    def __init__(self):
        self.state = 0
        self.allowed = threading.Event()
        self.writer = DeferredWriter()
        self.fails = False

    def save_to_path(self, path):
        (path / CHECKPOINT_MARK).write_text(str(self.state))
        self.writer.write(lambda state=self.state: self._write(path, state))

    def _write(self, path, state):
        if self.fails:
            raise OSError("No space left on device")
        assert self.allowed.wait(timeout=30)
        (path / "weights").write_text(str(state))

    def begin_saving(self, path):
        self.writer.deferring = True
        self.save_to_path(path)
        self.writer.deferring = False

    def saving_finished(self):
        return self.writer.finished()


@pytest.fixture
def algorithm():
    algorithm = SlowAlgorithm()
    yield algorithm
    algorithm.allowed.set()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_appears_once_all_of_it_is_written(algorithm, tmp_path):
    checkpoints = CheckpointWriter(algorithm, tmp_path, keep=2)
    algorithm.state = 1
    checkpoints.begin(1)
    algorithm.state = 2  # training goes on
    checkpoints.poll()
    assert list_checkpoints(tmp_path) == []
    algorithm.allowed.set()
    for iteration in (2, 3):
        checkpoints.begin(iteration)  # waits for the one before it
    assert (tmp_path / "000001" / "weights").read_text() == "1"
    checkpoints.finish()
    checkpoints.poll()
    assert names(tmp_path) == ["000002", "000003"]
    assert checkpoints.save(4) == tmp_path / "000004"
    assert names(tmp_path) == ["000003", "000004"]


def test_what_could_not_be_written_is_said_at_the_next_step_and_leaves_nothing(algorithm, tmp_path):
    checkpoints = CheckpointWriter(algorithm, tmp_path, keep=2)
    algorithm.fails = True
    checkpoints.begin(1)
    with pytest.raises(CheckpointError, match="could not be written: OSError: No space left"):
        checkpoints.finish()
    assert names(tmp_path) == []
    algorithm.fails = False
    algorithm.allowed.set()
    checkpoints.save(2)
    assert names(tmp_path) == ["000002"]


def test_a_write_that_does_not_end_is_given_up(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "WRITE_TIMEOUT_S", 0.1)
    checkpoints = CheckpointWriter(algorithm, tmp_path, keep=2)
    checkpoints.begin(1)
    with pytest.raises(CheckpointError, match="was not written within 0 s"):
        checkpoints.finish()
    assert names(tmp_path) == []


@pytest.mark.parametrize("save", ["begin", "save"])
def test_a_checkpoint_that_fails_half_way_leaves_nothing(save, tmp_path):
    class Failing(SlowAlgorithm):
        def save_to_path(self, path):
            (path / "part").write_text("x")
            raise EngineError("The engine died.")

    with pytest.raises(EngineError):
        getattr(CheckpointWriter(Failing(), tmp_path / "checkpoints", keep=2), save)(1)
    assert names(tmp_path / "checkpoints") == []


def test_an_interrupted_run_removes_what_is_not_complete(algorithm, tmp_path):
    checkpoints = CheckpointWriter(algorithm, tmp_path, keep=2)
    checkpoints.begin(1)
    checkpoints.discard()
    assert names(tmp_path) == []
