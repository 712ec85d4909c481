"""Signals that end the work: how many there were, whichever library was waiting, and a terminal that is closed."""

from __future__ import annotations

import ctypes
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from trial_ray.termination import GracefulInterrupt, hangups_blocked, interrupts_deferred, termination_as_interrupt


@pytest.fixture(autouse=True)
def default_signals():
    """A background process of a shell ignores SIGINT, one of nohup SIGHUP."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def press(*numbers, into=None):
    """Send signals in turn, then release what waits for ``into``: the main thread, in a library that is no Python."""
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), number)
    if into is not None:
        ctypes.CDLL(None).pthread_mutex_unlock(into)


def press_while_a_library_waits(*numbers):
    """Python handles signals when the library returns: of two of one number it would know one."""
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    presses = threading.Thread(target=press, args=numbers, kwargs={"into": mutex})
    presses.start()
    lock(mutex)
    presses.join()


@pytest.mark.parametrize("sends", [press, press_while_a_library_waits])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once_however_soon_it_comes(sends, number):
    requested = []
    with pytest.raises(KeyboardInterrupt), GracefulInterrupt(lambda: requested.append("request")) as interrupt:
        sends(number, number)
    assert (interrupt.requested, requested) == (True, ["request"])


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGHUP], [signal.SIGHUP, signal.SIGHUP]])
def test_a_signal_is_a_request_and_a_closed_terminal_never_the_second_one(numbers, monkeypatch):
    monkeypatch.setattr("trial_ray.termination.TERMINAL_MAJORS", ())  # that of these tests stays
    requested = []
    with GracefulInterrupt(lambda: requested.append("request")):
        press_while_a_library_waits(*numbers)
        requested.append("went on")
    assert requested == ["request", "went on"]


def test_handlers_are_as_before_and_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with termination_as_interrupt(), interrupts_deferred():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_processes_that_must_outlive_a_terminal_get_none_of_its_signals():
    shown = [
        sys.executable,
        "-c",
        "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ]
    with hangups_blocked():
        assert subprocess.run(shown, capture_output=True, text=True, check=True).stdout == "True\n"
    assert subprocess.run(shown, capture_output=True, text=True, check=True).stdout == "False\n"


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


def test_work_in_a_terminal_that_is_closed_goes_on_to_its_end(tmp_path):
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "file")])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "file").read_text() == "saved"
