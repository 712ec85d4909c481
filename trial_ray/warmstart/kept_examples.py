"""Examples on disk: a warm start that was interrupted while it cloned goes on from its demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trial_ray.rollout.partitions import IDS, new_schema, read_rows, write_rows
from trial_ray.warmstart.cache import get_or_build
from trial_ray.warmstart.cloning import Example

SCHEMA = new_schema(
    (("prompt_ids", IDS, "the prompt, `[P]`"), ("response_ids", IDS, "the demonstrated response, `[y]`")), version=1
)


def kept_examples(key: str, make: Callable[[], Sequence[Example]]) -> list[Example]:
    """The examples of a warm start in their order: those kept under ``key``, else made, and kept once there are all of them.

    Args:
        key: of everything that decides the examples.
        make: collects them.

    Raises:
        UserInputError: a kept file is damaged.
    """
    folder, _ = get_or_build("demonstrations", key, lambda work: _write(work, make()))
    columns = read_rows(folder, None, SCHEMA, "demonstrations", f"Remove {folder}: they are collected again.")
    prompts, responses = (columns[name].to_pylist() for name in SCHEMA.names)
    return [
        Example(np.array(prompt, np.int32), np.array(response, np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def _write(folder: Path, examples: Sequence[Example]) -> None:
    rows = [{"prompt_ids": each.prompt_ids, "response_ids": each.response_ids} for each in examples]
    write_rows(folder, 0, rows, SCHEMA, "demonstrator")
