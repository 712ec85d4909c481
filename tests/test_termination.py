"""Signals that end the work, also while a native library waits, and a terminal that is closed."""

import ctypes
import os
import pty
import signal
import sys
import threading
from contextlib import nullcontext

import pytest
from commands import run_python

from trial_ray.termination import GracefulInterrupt, hangups_blocked, interrupts_deferred, termination_as_interrupt


@pytest.fixture(autouse=True)
def default_signals():
    """Set the default handlers for a test: a background process of a shell ignores SIGINT, and nohup ignores SIGHUP."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def press(*numbers):
    """Send signals to this thread."""
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(number):
    requested = []
    with pytest.raises(KeyboardInterrupt), GracefulInterrupt(lambda: requested.append("request")) as interrupt:
        press(number, number)
    assert interrupt.requested
    assert requested == ["request"]


@pytest.mark.parametrize("numbers", [[signal.SIGTERM, signal.SIGHUP], [signal.SIGHUP, signal.SIGHUP]])
def test_one_signal_is_a_request_and_a_hangup_is_never_the_second(numbers, monkeypatch):
    """The main thread is in native code when the signals arrive; Python handles them when the call returns."""
    monkeypatch.setattr("trial_ray.termination.TERMINAL_MAJORS", ())  # keep the terminal of the tests
    library, mutex, requested = ctypes.CDLL(None), ctypes.create_string_buffer(64), []

    def press_and_unlock():
        press(*numbers)
        library.pthread_mutex_unlock(mutex)

    presses = threading.Thread(target=press_and_unlock)
    with GracefulInterrupt(lambda: requested.append("request")):
        library.pthread_mutex_lock(mutex)
        presses.start()
        library.pthread_mutex_lock(mutex)
        presses.join()
        requested.append("went on")
    assert requested == ["request", "went on"]


def test_handlers_are_restored_and_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with termination_as_interrupt(), interrupts_deferred():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_processes_started_with_hangups_blocked_ignore_them():
    shown = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    for context, blocked in {hangups_blocked: "True\n", nullcontext: "False\n"}.items():
        with context():
            done = run_python(shown)
        assert (done.returncode, done.stdout) == (0, blocked)


IN_A_TERMINAL = """
import sys, time
from trial_ray.termination import GracefulInterrupt
with GracefulInterrupt(lambda: print("requested", flush=True)) as interrupt:
    print("ready", flush=True)
    while not interrupt.requested:
        time.sleep(0.01)
    print("finished", flush=True)
open(sys.argv[1], "w").write("saved")
"""


def test_work_in_a_closed_terminal_is_finished(tmp_path):
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, f"{tmp_path}/file"])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "file").read_text() == "saved"
