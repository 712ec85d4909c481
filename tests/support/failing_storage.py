"""A storage on this machine's disk that fails on request, and notes what is written and removed."""

from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem

from trial_ray.runs.storage import Storage


class FailingFiles(LocalFileSystem):
    """The local file system.

    Attributes:
        broken: whether every call fails.
        fails: called with a path before it is written; the write fails where that is true.
        done: ``+NAME`` for each file that was begun, ``-NAME`` for each file or folder that was removed.
    """

    cachable = False

    def __init__(self, root):
        super().__init__()
        self._root = f"{root}/"
        self.broken = False
        self.fails = lambda path: False
        self.done = []

    def _answer(self):
        if self.broken:
            raise OSError("the storage is broken")

    def info(self, path, **options):
        self._answer()
        return super().info(path, **options)

    def isdir(self, path):
        self._answer()
        return super().isdir(path)

    def mkdir(self, path, **options):
        self._answer()
        super().mkdir(path, **options)

    def rm(self, path, **options):
        self.done.append("-" + path.removeprefix(self._root))
        self._answer()
        super().rm(path, **options)

    def open(self, path, mode="rb", **options):
        self._answer()
        if mode == "wb" and self.fails(path):
            raise OSError(f"{path} was refused")
        opened = super().open(path, mode, **options)
        if mode == "wb":
            self.done.append("+" + path.removeprefix(self._root))
        return opened


def failing_storage(monkeypatch, root):
    """Let every URI open the folder ``root``."""
    files = FailingFiles(root)
    monkeypatch.setattr(Storage, "open", lambda uri: Storage(uri, PyFileSystem(FSSpecHandler(files)), str(root)))
    return files
