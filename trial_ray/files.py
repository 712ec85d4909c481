"""Files written whole or not at all and checked when read, texts that they can hold, texts without secrets, and the cache."""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trial_ray.errors import CheckpointError, TrialRayError, UnwritableError, UserInputError

PACKAGE = Path(__file__).parent
"""Folder of this package: in a clone, or where it is installed."""
HIDDEN = "<hidden>"
_NAME = r"(?:token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|auth)"
SECRET = re.compile(rf"(?i)(^|[_.-]){_NAME}$")
"""Names of values that are not written; ``max_prompt_tokens`` is none of them."""
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A text that stands for the value of an environment variable (:func:`trial_ray.secrets.secret`)."""
NAMED: set[str] = set()
"""Environment variables that such texts have named in this process."""
LEAST_SECRET = 8
"""Characters from which the value of a secret environment variable is looked for in texts."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
_ASSIGNED = re.compile(rf"(?i)(?<![a-z])({_NAME}['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s'\",;)}}\]]+)")


def examples_folder() -> Path:
    """The folder ``tuned_examples``: a wheel's own, else the one beside the package in a clone."""
    packaged = PACKAGE / "tuned_examples"
    return packaged if packaged.is_dir() else PACKAGE.parent / "tuned_examples"


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with :data:`HIDDEN` for values that are secret by their name, and wherever a secret of the environment occurs."""
    return {str(name): _cleaned(name, value) for name, value in settings.items()}


def _cleaned(name: object, value: Any) -> Any:
    if SECRET.search(str(name)) and value is not None and not (isinstance(value, str) and REFERENCE.fullmatch(value)):
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_cleaned("", inner) for inner in value]
    return _without_known(value) if isinstance(value, str) else value


def redacted(text: str, *, code: bool = False) -> str:
    """Text, such as a command line or a traceback, with :data:`HIDDEN` for what looks like a secret in it.

    Args:
        text: any.
        code: whether it is Python, which goes on being that: of what is assigned, only strings are replaced.
    """

    def hide(found: re.Match[str]) -> str:
        quote = found[2][0] if found[2][0] in "'\"" else ""
        names_variable = REFERENCE.match(found.string, found.start(2) + len(quote))
        return found[0] if names_variable or (code and not quote) else f"{found[1]}{quote}{HIDDEN}{quote}"

    return _ASSIGNED.sub(hide, _without_known(text))


def _without_known(text: str) -> str:
    for name, secret in os.environ.items():
        if (SECRET.search(name) or name in NAMED) and len(secret) >= LEAST_SECRET:
            text = text.replace(secret, HIDDEN)
    return _IN_ADDRESS.sub(HIDDEN, text)


_TO_ESCAPE = re.compile(r"[\ud800-\udfff]|\\(?=u(?:d[89a-f][0-9a-f]{2}|005c))")
_ESCAPE = re.compile(r"\\u(d[89a-f][0-9a-f]{2}|005c)")


def escaped(text: str) -> str:
    """``text`` without lone surrogates."""
    return _TO_ESCAPE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def unescaped(text: str) -> str:
    """The text that :func:`escaped` was given."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)


_CONTROL_PICTURES = 0x2400
_DELETE, _DELETE_PICTURE = "\x7f", "\N{SYMBOL FOR DELETE}"


def visible(text: str) -> str:
    """The text with control characters escaped; line breaks stay.

    Control characters become their Unicode pictures (``␛`` for escape), all else that is not printable (lone surrogates,
    controls of the writing direction, line and paragraph separators, blanks of no width) its code point, ``⟨U+202E⟩``.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char == "\n" or char.isprintable() else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    if char < " ":
        return chr(_CONTROL_PICTURES + ord(char))
    return _DELETE_PICTURE if char == _DELETE else f"⟨U+{ord(char):04X}⟩"


def text_digest(text: str) -> bytes:
    """SHA-256 of a text, lone surrogates included."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def partial_of(path: Path) -> Path:
    """A hidden name beside ``path``, under which a file or folder is written before it is renamed."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")


def set_aside(path: Path, reason: str) -> Path:
    """Rename a file or folder that cannot be used, so that no command reads it; returns its new name."""
    return path.rename(path.with_name(f"{path.name}.{reason}-{uuid.uuid4().hex[:8]}"))


FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While entered, errors of the operating system mean that ``path`` cannot be written; those of a full file system stay.

    Raises:
        UnwritableError: in place of them.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, UnwritableError) or error.errno in (*FULL, errno.ENAMETOOLONG):
            raise  # the command line shortens a name that is too long
        reason = error.strerror or error
        raise UnwritableError(f"{path} cannot be written ({reason}). Name another place, or free this one.") from error


def require_file(path: Path) -> None:
    """Reject what :func:`write_text` would not replace.

    Raises:
        UserInputError: ``path`` is a folder or a device.
    """
    if not path.name or (path.exists() and not path.is_file()):
        raise UserInputError(f"{str(path)!r} is not a file that can be written. Name a file.")


def write_text(path: Path | str, text: str) -> Path:
    """Write ``text`` to ``path`` atomically.

    Raises:
        UserInputError: as :func:`require_file`.
        UnwritableError: nothing can be written there.
    """
    path = Path(path)
    require_file(path)
    partial = partial_of(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # UTF-8 has no form for lone surrogates; the escape that stands for one is JSON's, too.
            with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write ``value`` as indented strict JSON (NaN is refused: other readers could not parse it)."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def checked_content(path: Path) -> Iterator[None]:
    """While entered, errors in reading the content of ``path`` name the file.

    Raises:
        CheckpointError: the file is missing, damaged, or of another version.
    """
    try:
        yield
    except TrialRayError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"Cannot read {path}: {type(error).__name__}: {str(error)[:200]}.") from error


def read_json(path: Path, schema: str = "", version: int = 0) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        schema: of the object; empty: any.
        version: of the schema.

    Raises:
        CheckpointError: the file is missing or damaged, holds no object, or one of another schema or version.
    """
    with checked_content(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it has no JSON object")
        if schema and (found.get("schema"), found.get("schema_version")) != (schema, version):
            raise CheckpointError(f"{path} was written by another version; expected {schema} {version}.")
    return found


def read_lines(path: Path) -> list[str]:
    """Lines of a file that a crash may have cut or damaged: bytes that are no UTF-8 are replaced, so that the other lines stay."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def make_folder(path: Path) -> None:
    """Make a folder for results, before what they cost is spent.

    Raises:
        UserInputError: it cannot be made, or not be written into.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserInputError(f"The folder {path} cannot be written into. Name another one, or change its permissions.")


def finite(value: Any, replace: Callable[[str], Any] = lambda name: None, **options: Any) -> Any:
    """The value as strict JSON holds it, with ``None`` for each number that is not finite.

    Args:
        value: of plain types.
        replace: gives something else than ``None`` for ``Infinity``, ``-Infinity`` and ``NaN``.
        options: of ``json.dumps``.
    """
    return json.loads(json.dumps(value, **options), parse_constant=replace)


def nearest_folder(path: Path) -> str:
    """A sentence, after a blank, that names the folder of a file ``path``, or one beside ``path`` of a near name; else empty."""
    if path.is_file():
        return f" Did you mean {path.parent}?"
    beside = sorted({each.name for each in path.parent.glob("[!.]*/")} - {path.name})
    longer = [name for name in beside if path.name and path.name in name]
    near = longer if len(longer) == 1 else difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.with_name(near[0])}?" if near else ""


def require_new_folder(folder: Path, instead: str = "") -> None:
    """Reject the name of a folder that :func:`write_folder` could not make.

    Args:
        folder: to be made.
        instead: what else the user can do, for the message.

    Raises:
        UserInputError: the folder holds something, or it, or one that it lies in, is a file or may not be written into.
    """
    file = next((each for each in (folder, *folder.parents) if each.exists() and not each.is_dir()), None)
    if file is not None:
        raise UserInputError(f"{file} is a file. Name a new folder{instead}.")
    if folder.is_dir() and (found := sorted(each.name for each in folder.iterdir())):
        raise UserInputError(f"{folder} is not empty, it contains {found[0]}. Name a new folder{instead}.")
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserInputError(f"{there} cannot be written into. Name a folder elsewhere{instead}.")


def require_writable(folder: Path) -> None:
    """Reject the name of a folder beside which none can be made, before what it is to hold is made.

    Raises:
        UnwritableError: nothing can be written there.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(folder)
        partial.mkdir()
        partial.rmdir()


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a new folder, which appears as ``folder`` only once it is complete.

    An empty folder that is there already is filled: it may be a mount point, or the one in which a process works.

    Raises:
        UnwritableError: nothing can be written there.
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
        partial.mkdir()  # one command alone fills the folder
    try:
        write(partial / "whole")
        for entry in (partial / "whole").iterdir():
            os.replace(entry, folder / entry.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_folder(folder: Path, keep: bool = False) -> None:
    """Remove a folder and what is in it.

    Args:
        folder: to be removed.
        keep: leave the folder itself, empty.
    """
    if not keep:
        shutil.rmtree(folder)
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


# -- the cache ---------------------------------------------------------------------------------------------------------

CACHE_VARIABLE = "TRIAL_RAY_CACHE"


def cache_root() -> Path:
    """``TRIAL_RAY_CACHE``, else ``~/.cache/trial_ray``."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "trial_ray").expanduser()


def content_key(content: Mapping[str, Any]) -> str:
    """SHA-256 (hexadecimal, 24 digits) of plain values; equal values give equal keys, whatever their order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()[:24]


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 (hexadecimal) of names and contents of files, wherever their folders are."""
    entries = sorted(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest() for path in files)
    return hashlib.sha256(b"".join(entries)).hexdigest()


def get_or_build(kind: str, key: str, build: Callable[[Path], object]) -> tuple[Path, bool]:
    """The folder ``<cache>/<kind>/<key>``, which ``build`` fills if it is not there.

    An interrupted build leaves nothing under the key. Of two that build at the same time, the first to finish gives its folder
    to both.

    Returns:
        The folder, and whether it was there already.
    """
    folder = cache_root() / kind / key
    if folder.is_dir():
        return folder, True

    def fill(partial: Path) -> None:
        partial.mkdir()
        build(partial)

    try:
        write_folder(folder, fill)
    except OSError:
        if not folder.is_dir():  # else another process made it meanwhile
            raise
    return folder, False
