"""File utilities: atomic writes, checked reads, text escaping, errors of full file systems, and cached folders."""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trial_ray.errors import CheckpointError, StorageError, TrialRayError, UnwritableError, UserInputError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
"""A JSON object."""
Numbers = dict[str, float]
"""Numbers by name, such as the metrics of an iteration."""
Record = Mapping[str, Any]
"""A JSON object, or the settings of a config, for reading only."""
PACKAGE = Path(__file__).parent
"""Folder of this package, in a clone or an installation."""


def examples_folder() -> Path:
    """Return the folder ``tuned_examples``: inside the package in a wheel, else next to the package in a clone."""
    packaged = PACKAGE / "tuned_examples"
    return packaged if packaged.is_dir() else PACKAGE.parent / "tuned_examples"


_TO_ESCAPE = re.compile(r"[\ud800-\udfff]|\\(?=u(?:d[89a-f][0-9a-f]{2}|005c))")
_ESCAPE = re.compile(r"\\u(d[89a-f][0-9a-f]{2}|005c)")


def escaped(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, as JSON escapes."""
    return _TO_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def unescaped(text: str) -> str:
    """Reverse :func:`escaped`."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


_CONTROL_PICTURES = 0x2400
_DELETE, _DELETE_PICTURE = "\x7f", "\N{SYMBOL FOR DELETE}"


def visible(text: str) -> str:
    """Replace characters that are not printable by visible ones; line breaks are kept.

    Control characters become their Unicode pictures (``␛`` for escape). Other characters that are not printable (lone surrogates,
    controls of the writing direction, line and paragraph separators, zero-width spaces) become their code point, ``⟨U+202E⟩``.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char == "\n" or char.isprintable() else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    if char < " ":
        return chr(_CONTROL_PICTURES + ord(char))
    return _DELETE_PICTURE if char == _DELETE else f"⟨U+{ord(char):04X}⟩"


def text_digest(text: str) -> bytes:
    """Return the SHA-256 of a text, including lone surrogates."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def partial_of(path: Path) -> Path:
    """Return a hidden name next to ``path``, for writing a file or folder before it is renamed to ``path``."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Create the folder of a file, and yield the path of a temporary file next to it, which replaces the file at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def set_aside(path: Path, reason: str) -> Path:
    """Rename an unusable file or folder to a name that no command reads, and return its new path."""
    return path.rename(path.with_name(f"{path.name}.{reason}-{uuid.uuid4().hex[:8]}"))


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers (errno) of a full file system and of an exhausted disk quota."""


def storage_error(error: BaseException, folder: Path, address: str = "") -> StorageError | None:
    """Return a :class:`StorageError` if a full file system caused an error; ``None`` for any other cause.

    Args:
        error: the error that ended the run, with its chain of causes.
        folder: the run's folder.
        address: path or URI with which the user resumes the run; if empty, ``folder``.
    """
    # Search the traceback's text: errors of other processes and of native libraries are not always an OSError.
    text = "".join(traceback.format_exception(error))
    for words in map(os.strerror, FULL):
        if words in text:
            return StorageError(
                f"There is no space left for the run in {folder} ({words}). Free some, then continue with "
                f"--resume {address or folder}."
            )
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert errors of the operating system inside the context to errors that name ``path``.

    Errors of a full file system and of a name that is too long keep their type, because the callers report them.

    Raises:
        UnwritableError: ``path`` cannot be written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, UnwritableError) or error.errno in (*FULL, errno.ENAMETOOLONG):
            raise
        reason = error.strerror or error
        raise UnwritableError(f"{path} cannot be written ({reason}). Name another place, or free this one.") from error


def require_file(path: Path) -> None:
    """Reject a path that :func:`write_text` would not replace.

    Raises:
        UserInputError: ``path`` is a folder or a device.
    """
    if not path.name or (path.exists() and not path.is_file()):
        raise UserInputError(f"{str(path)!r} is not a file that can be written. Name a file.")


def write_text(path: Path | str, text: str) -> Path:
    """Write ``text`` to ``path`` atomically.

    Raises:
        UserInputError: ``path`` is a folder or a device.
        UnwritableError: the file cannot be written.
    """
    path = Path(path)
    require_file(path)
    # UTF-8 cannot encode lone surrogates; "backslashreplace" writes them as JSON escapes.
    with (
        writing(path),
        replacing(path) as partial,
        partial.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write ``value`` as indented strict JSON (NaN is rejected: other readers could not parse it)."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def checked_content(path: Path) -> Iterator[None]:
    """Convert errors while reading the content of ``path`` to errors that name the file.

    Raises:
        CheckpointError: the file is missing, damaged, or of another version.
    """
    try:
        yield
    except TrialRayError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"Cannot read {path}: {type(error).__name__}: {str(error)[:200]}.") from error


def read_json(path: Path, schema: str = "", version: int = 0) -> Json:
    """Read the JSON object in a file.

    Args:
        path: the file.
        schema: required name of the schema; if empty, any schema is accepted.
        version: required version of the schema.

    Raises:
        CheckpointError: the file is missing or damaged, contains no object, or has another schema or version.
    """
    with checked_content(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it has no JSON object")
        if schema and (content.get("schema"), content.get("schema_version")) != (schema, version):
            raise CheckpointError(f"{path} was written by another version; expected {schema} {version}.")
    return content


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file that a crash may have truncated or damaged.

    Bytes that are not UTF-8 are replaced, so that the other lines stay readable.
    """
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def make_folder(path: Path) -> None:
    """Create a folder for results, before they are computed.

    Raises:
        UserInputError: the folder cannot be created or written into.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserInputError(f"The folder {path} cannot be written into. Name another one, or change its permissions.")


def finite(value: Any, replace: Callable[[str], Any] = lambda name: None, **options: Any) -> Any:
    """Convert a value to strict JSON types, with a replacement for each non-finite number.

    Args:
        value: value of types that ``json.dumps`` supports.
        replace: function that returns the replacement of ``Infinity``, ``-Infinity`` or ``NaN`` from its name; by default, each
            becomes ``None``.
        options: options of ``json.dumps``.
    """
    return json.loads(json.dumps(value, **options), parse_constant=replace)


def nearest_folder(path: Path) -> str:
    """Return a sentence, with a leading space, that suggests another folder than ``path``; empty if none has a similar name.

    The suggestion is the parent folder if ``path`` is a file, else a folder next to ``path`` with a similar name.
    """
    if path.is_file():
        return f" Did you mean {path.parent}?"
    siblings = sorted({folder.name for folder in path.parent.glob("[!.]*/")} - {path.name})
    longer = [name for name in siblings if path.name and path.name in name]
    nearest = longer if len(longer) == 1 else difflib.get_close_matches(path.name, siblings, n=1)
    return f" Did you mean {path.with_name(nearest[0])}?" if nearest else ""


def require_new_folder(folder: Path, instead: str = "") -> None:
    """Reject the name of a folder that :func:`write_folder` could not create.

    Args:
        folder: folder to create.
        instead: alternative that the error message suggests after "Name a new folder"; may be empty.

    Raises:
        UserInputError: the folder is not empty, or the folder or a parent of it is a file or not writable.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise UserInputError(f"{existing} is a file. Name a new folder{instead}.")
    if folder.is_dir() and (names := sorted(entry.name for entry in folder.iterdir())):
        raise UserInputError(f"{folder} is not empty, it contains {names[0]}. Name a new folder{instead}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserInputError(f"{existing.absolute()} cannot be written into. Name a folder elsewhere{instead}.")


def require_writable(folder: Path) -> None:
    """Check that a folder can be created at a path, before its content is computed.

    Raises:
        UnwritableError: the folder cannot be created.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(folder)
        partial.mkdir()
        partial.rmdir()


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` create a new folder, which appears as ``folder`` only once it is complete.

    An existing empty folder is filled instead: it may be a mount point or the working directory of a process.

    Raises:
        UnwritableError: the folder cannot be created.
    """
    folder = folder.resolve()
    if folder.is_dir():
        _fill(folder, write)
        return
    require_writable(folder)
    partial = partial_of(folder)
    try:
        write(partial)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, write: Callable[[Path], object]) -> None:
    partial = folder / ".partial"
    with writing(folder):
        partial.mkdir()  # mkdir() raises an error if another command is filling the folder.
    try:
        write(partial / "whole")
        for entry in (partial / "whole").iterdir():
            os.replace(entry, folder / entry.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# -- the cache ---------------------------------------------------------------------------------------------------------

CACHE_VARIABLE = "TRIAL_RAY_CACHE"


def cache_root() -> Path:
    """Return the cache folder: ``TRIAL_RAY_CACHE``, else ``~/.cache/trial_ray``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "trial_ray").expanduser()


def content_key(content: Mapping[str, Any]) -> str:
    """Return the first 24 hexadecimal digits of the SHA-256 of named values; the order of the names does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()[:24]


def file_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file's content, which is read in chunks, since weights may be larger than the memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def files_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 (hexadecimal) of the names and contents of files, regardless of their folders."""
    entries = sorted(path.name.encode() + b"\0" + file_digest(path) for path in files)
    return hashlib.sha256(b"".join(entries)).hexdigest()


BUILD_S = 4 * 3600.0
"""Seconds to wait while another process creates a cached folder."""


def get_or_build(kind: str, key: str, build: Callable[[Path], object]) -> tuple[Path, bool]:
    """Return the folder ``<cache>/<kind>/<key>``, filled by ``build`` if it does not exist.

    An interrupted build leaves no such folder. If several processes need the same folder, one of them creates it, and the
    others wait. On a file system without locks, all create it, and the folder that is complete first is used.

    Returns:
        The folder, and whether it existed already.
    """
    folder = cache_root() / kind / key
    if folder.is_dir():
        return folder, True

    def fill(partial: Path) -> None:
        partial.mkdir()
        build(partial)

    with _build_lock(folder):
        if folder.is_dir():
            return folder, True
        try:
            write_folder(folder, fill)
        except OSError:
            if not folder.is_dir():  # If the folder exists, another process has built it meanwhile.
                raise
    return folder, False


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Lock a cached folder while it is created; wait at most :data:`BUILD_S` seconds for another process to release it."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"), thread_local=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("Waiting for another process that makes %s", folder)
            lock.acquire(timeout=BUILD_S)
    except (OSError, NotImplementedError) as error:  # OSError includes filelock's Timeout.
        logger.warning("%s is made without a lock: %s", folder, error)
    try:
        yield
    finally:
        with suppress(OSError):  # Waiting processes need no lock file once the folder exists.
            os.unlink(lock.lock_file)
        lock.release()
