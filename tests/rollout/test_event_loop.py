"""Coroutines of a command, in a script and in a notebook, whose own loop runs in the same thread."""

import asyncio
import threading

from trial_ray.rollout.env_runner import outside_loop


async def value():
    return threading.current_thread()


def test_a_loop_may_be_started_where_one_runs_already():
    async def notebook():
        return outside_loop(lambda: asyncio.run(value()))

    assert asyncio.run(notebook()) is not threading.main_thread()
    assert outside_loop(lambda: asyncio.run(value())) is threading.main_thread()
