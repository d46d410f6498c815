"""Requests to stop: the first signal asks, and no second SIGTERM ends a run that is saving."""

import os
import signal
import subprocess
import sys

import pytest

from shardwright.cluster.stopping import Stopped, StopRequest

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_later_sigterms_change_nothing_and_a_second_sigint_acts_as_usual(first):
    # The shell's `&` has a program ignore SIGINT, and nohup SIGHUP.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequest() as stop:
        assert stop.poll() is None
        os.kill(os.getpid(), first)
        assert stop.poll() == first.name
        os.kill(os.getpid(), signal.SIGTERM)  # as schedulers send at the end of the grace time
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_before_the_first_step_a_signal_ends_a_run_at_once(number):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequest(at_once=True):
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Stopped):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # while it cleans up
    with StopRequest(at_once=True), StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.poll() == number.name
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


HANGS_UP = r"""
import os, pty, signal, sys, time
from shardwright.cluster.stopping import StopRequest
from shardwright.settings.output import say
signal.signal(signal.SIGHUP, signal.SIG_DFL)
child, terminal = pty.fork()
if child:
    while b"\n" not in os.read(terminal, 100):  # "begun" may come before the rest of its line is written
        pass
    os.close(terminal)  # the kernel sends SIGHUP, and writing to the terminal fails
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with StopRequest() as stop:
    print("begun", flush=True)
    while stop.poll() is None:
        time.sleep(0.01)
    say("stopped", flush=True)
    open(sys.argv[1], "w").write(stop.poll())
"""


@pytest.mark.long
def test_a_lost_terminal_does_not_keep_a_run_from_saving(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", HANGS_UP, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_nohup_goes_on_after_a_hangup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.poll() is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
