"""One rule for running coroutines whose results are large."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_quietly(loop: asyncio.Runner, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine; the task that asyncio makes of it has no result.

    ``Runner.run`` puts SIGINT's handler back when it ends, and while doing so Python writes out the finished task, result
    and all: half a second for the trajectories of an iteration.
    """
    results: list[Result] = []

    async def collect() -> None:
        results.append(await coroutine)

    loop.run(collect())
    return results[0]
