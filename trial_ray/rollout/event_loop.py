"""Where and how coroutines are run: outside of a loop that runs already, and without writing out large results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
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


def outside_loop(call: Callable[[], Result]) -> Result:
    """Call a function that runs coroutines; where a loop runs in this thread, as in a notebook, in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()
