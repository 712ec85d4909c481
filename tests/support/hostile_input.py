"""Strategies for hostile input: any Unicode text, JSON of another shape, and changed or truncated files."""

import json

from hostile_texts import HOSTILE
from hypothesis import strategies as st

from trial_envs.errors import TrialEnvError
from trial_ray.errors import TrialRayError

SPECIAL = (
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "</action>",
    "<action>",
    "<think>",
    "</think>",
    "[bold]",
    "[/]",
    "{{ 7 * 7 }}",
    "{0.__class__}",
    "\\u005c",
    "\\ud800",
    "../../etc/passwd",
    "\u0130\ufb03\u1e9e",  # lower case has another length
)
ANY = st.text(st.characters(), max_size=30)
"""Any code points, including lone surrogates, NUL and direction controls."""
TEXTS = st.lists(st.sampled_from(HOSTILE + SPECIAL) | ANY, max_size=5).map("".join)
WORDS = st.text(st.characters(exclude_characters="\0"), max_size=12)

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | TEXTS
    | st.sampled_from(["", "..", "/", "nan", "None", "1e400"])
)
VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=5
)
"""Values that Python's JSON reader accepts, including NaN and infinities."""


def changed_json(value):
    """Return ``value`` with one part, at any depth, replaced or removed."""
    return st.tuples(st.sampled_from(_paths(value)), st.booleans(), VALUES).map(lambda drawn: _changed(value, *drawn))


def _paths(value, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in _paths(each, (*path, key)))]


def _changed(value, path, removed, new):
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    part = copy
    for key in path[:-1]:
        part = part[key]
    if removed:
        del part[path[-1]]
    else:
        part[path[-1]] = new
    return copy


def changed_bytes(content):
    """Return ``content`` truncated, with changed or inserted bytes, or other bytes."""

    def replaced(begin, length, new):
        return content[:begin] + new + content[begin + length :]

    index = st.integers(0, max(0, len(content) - 1))
    flipped = st.builds(lambda at, bit: replaced(at, 1, bytes([content[at] ^ (1 << bit)])), index, st.integers(0, 7))
    lengths = st.sampled_from([0, 1, 8, len(content)])
    changed = st.builds(replaced, index, lengths, st.binary(max_size=8)) | st.binary(max_size=40)
    return flipped | changed if content else changed


def changed_content(file):
    """Return the content of ``file`` with changed bytes or, for a JSON file, changed values."""
    content = file.read_bytes()
    changed = changed_bytes(content)
    if file.suffix == ".json":
        # json.dumps escapes lone surrogates.
        changed |= changed_json(json.loads(content)).map(lambda value: json.dumps(value).encode())
    return changed


def refused(call, *errors):
    """Return the result of ``call``, or its typed error (or one of ``errors``); other errors are raised."""
    try:
        return call()
    except (TrialRayError, TrialEnvError, *errors) as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} says nothing") from error
        return error
