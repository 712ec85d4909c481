"""A storage on this machine's disk that fails on request, and notes what is written and removed."""

from __future__ import annotations

from pathlib import Path

from pyarrow.fs import FileSystemHandler, LocalFileSystem, PyFileSystem

from trial_ray.runs.storage import Storage


class FailingHandler(FileSystemHandler):
    """pyarrow's local file system.

    Attributes:
        broken: whether every call fails.
        fails: called with a path before it is written; the write fails where that is true.
        done: ``+NAME`` for each file that was begun, ``-NAME`` for each file or folder that was removed.
    """

    def __init__(self, root: Path) -> None:
        self._local, self._root = LocalFileSystem(), str(root)
        self.broken = False
        self.fails = lambda path: False
        self.done: list[str] = []

    def _note(self, sign: str, path: str) -> None:
        self.done.append(sign + path.removeprefix(self._root + "/"))

    def _call(self, name: str, *arguments, **options):
        if self.broken:
            raise OSError("the storage is broken")
        return getattr(self._local, name)(*arguments, **options)

    def get_type_name(self):
        return "failing"

    def get_file_info(self, paths):
        return self._call("get_file_info", paths)

    def get_file_info_selector(self, selector):
        return self._call("get_file_info", selector)

    def create_dir(self, path, recursive):
        self._call("create_dir", path, recursive=recursive)

    def delete_dir(self, path):
        self._note("-", path)
        self._call("delete_dir", path)

    def delete_dir_contents(self, path, missing_dir_ok=False):
        self._call("delete_dir_contents", path)

    def delete_root_dir_contents(self):
        raise AssertionError("a stored run must never empty the whole storage")

    def delete_file(self, path):
        self._note("-", path)
        self._call("delete_file", path)

    def move(self, src, dest):
        self._call("move", src, dest)

    def copy_file(self, src, dest):
        self._call("copy_file", src, dest)

    def open_input_stream(self, path):
        return self._call("open_input_stream", path, compression=None)

    def open_input_file(self, path):
        return self._call("open_input_file", path)

    def open_output_stream(self, path, metadata):
        if self.fails(path):
            raise OSError(f"{path} was refused")
        stream = self._call("open_output_stream", path, compression=None)
        self._note("+", path)
        return stream

    def open_append_stream(self, path, metadata):
        return self._call("open_append_stream", path, compression=None)

    def normalize_path(self, path):
        return path


def failing_storage(monkeypatch, root: Path) -> FailingHandler:
    """Let every URI open the folder ``root``."""
    handler = FailingHandler(root)
    monkeypatch.setattr(Storage, "open", lambda uri: Storage(uri, PyFileSystem(handler), str(root)))
    return handler
