"""Every environment continues in a forked child, and a child does not change its parent.

The forks happen in a separate process, because a fork of the test process would inherit locks of Ray's threads.
"""

import subprocess
import sys

import pytest

TINY = {"split": "generated", "difficulty": "tiny", "num_games": 4}
SETTINGS = {"trial/ALFWorld-v0": TINY, "trial/WebShop-v0": TINY, "trial/TextWorld-v0": {"level": 1, "num_games": 4}}

PROCESS = """
import faulthandler, os, signal, sys, threading
import gymnasium
import trial_envs

faulthandler.register(signal.SIGALRM, chain=True)
signal.alarm(200)


def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(90)
        work()
        sys.exit(0)  # unlike os._exit, this runs what is registered with atexit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def finish(env):
    return [env.step(command) for command in env.unwrapped.walkthrough]


def make():
    return gymnasium.make(ENV_ID, **SETTINGS)


"""


def run(code, **names):
    """Run code with names in a separate process."""
    definitions = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    done = subprocess.run(
        [sys.executable, "-c", definitions + PROCESS + code], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("env_id", SETTINGS)
def test_parent_and_forked_child_continue_independently(env_id):
    code = """
env = make()
first = env.reset(options={"task": 0})
answers = finish(env)

def forget():
    global env
    del env

for work in (env.close, lambda: env.reset(options={"task": 1}), forget, lambda: None):
    in_child(work)
    assert (env.reset(options={"task": 0}), finish(env)) == (first, answers)

stop = threading.Event()

def play():
    while not stop.is_set():
        other = gymnasium.make(ENV_ID, **SETTINGS | {"num_games": 3})
        other.reset()
        finish(other)
        other.close()

def work():
    assert finish(env) == answers
    assert env.reset(options={"task": 0}) == first
    again = make()
    assert again.reset(options={"task": 0}) == first
    again.close()
    env.close()

thread = threading.Thread(target=play)
thread.start()
try:
    for _ in range(FORKS):
        env.reset(options={"task": 0})
        in_child(work)
finally:
    stop.set()
    thread.join(60)
assert (env.reset(options={"task": 0}), finish(env)) == (first, answers)
env.close()
"""
    forks = 1 if "TextWorld" in env_id else 4  # a game takes a second to make, during which its lock is held
    run(code, ENV_ID=env_id, SETTINGS=SETTINGS[env_id], FORKS=forks)


def test_locks_may_be_nested_in_any_order_beside_a_fork():
    code = """
from concurrent.futures import ThreadPoolExecutor
from trial_envs.core.forks import fork_safe_lock

one, other = fork_safe_lock(), fork_safe_lock()

def are_free():  # Another thread can acquire the locks.
    with ThreadPoolExecutor() as pool:
        return all(pool.map(lambda lock: lock.acquire(blocking=False) and not lock.release(), (one, other)))

for outer, inner in ((one, other), (other, one)):
    held, forking = threading.Event(), threading.Event()

    def nest():
        with outer:
            held.set()
            forking.wait()
            threading.Event().wait(0.3)  # the fork waits for the locks meanwhile
            with inner:
                pass

    thread = threading.Thread(target=nest)
    thread.start()
    held.wait()
    forking.set()
    in_child(lambda: are_free() or sys.exit(1))
    thread.join()
    assert are_free()
"""
    run(code)
