"""Every call that may block for ever has a timeout, or is listed here with a reason."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]

BARE = {"join", "get", "result", "wait", "acquire"}
"""Methods that wait for ever when they are called without an argument."""
TIMED = {
    "ray.get",
    "ray.wait",
    "subprocess.run",
    "subprocess.check_call",
    "subprocess.check_output",
    "communicate",
    "foreach_actor",
    "foreach_env_runner",
    "foreach_learner",
}
"""Calls that need the keyword argument ``timeout``, or ``timeout_seconds`` in calls of RLlib's managers."""

ALLOWED = """
process.py run_outside_event_loop (...).result: the caller's own work, in a thread of its own
rollout/env_runner_pool.py _sample playing.result.result: the future is done
engines/pool.py answers future.result: the future is done
algorithms/learner_group.py update ray.get: ray.wait has returned these calls as ready
algorithms/learner_group.py _cause ray.get: ray.wait has returned these calls as ready
algorithms/learner_group.py ask result.get: RLlib's result of a call that has ended
algorithms/rllib_settings.py build_learner_group LEARNERS_PLACED.get: a context variable
engines/actor.py _work self._calls.get: an idle engine's thread waits for work, or for the shutdown
engines/protocol.py write self._idle.wait: inside asyncio.wait_for
core/forks.py _acquire_all (...).acquire: the holder starts or loads, and waits for no other lock here
alfworld/engine.py __init__ LIBRARIES.acquire: the holder copies a library, and waits for nothing
program/env.py _start (...).result: the caller's own program, inside the time of one step
program/env.py _advance (...).result: the caller's own program, inside the time of one step
program/env.py _next called.result: the task is done
program/env.py _next self._calls.exhausted.wait: the caller's own program, inside the time of one step
program/env.py _result self._program.result: the task is done
program/calls.py next self._arrived.wait: the caller's own program, inside the time of one step
program/calls.py complete future.result: the future is done
program/local_endpoint.py _reply call.result: the task is done
rollout/episode.py _decided deciding.result: the task is done
evaluation/local_games.py play idle.get: freed by episodes of this process, which end or raise
learner/exchange.py finish pending.wait: a collective, which the process group's own timeout ends
rollout/env_runner.py _play_rollouts self._slots.free.acquire: freed by rollouts, whose requests have deadlines
"""
"""Waits without a deadline (file, function, call), each with the reason."""


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "(...)"


def waits(tree, function="module"):
    """Yield function and call, with a blank between them, of each wait without a deadline."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, last = dotted(node.func), node.func.attr
            needed = "timeout_seconds" if last.startswith("foreach_") else "timeout"
            given = {keyword.arg for keyword in node.keywords}
            bare = last in BARE and not node.args and not given
            if bare or ({name, last} & TIMED and given.isdisjoint((needed, None))):
                yield f"{inner} {name}"
        yield from waits(node, inner)


def test_every_wait_has_a_deadline_or_a_reason():
    assert {line.partition(": ")[0] for line in ALLOWED.strip().splitlines()} == {
        f"{path.relative_to(ROOT / package)} {wait}"
        for package in ("trial_ray", "envs/trial_envs")
        for path in (ROOT / package).rglob("*.py")
        for wait in waits(ast.parse(path.read_text()))
    }
