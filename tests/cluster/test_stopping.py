"""Requests to stop: the first signal asks, and no second SIGTERM ends a run that is saving."""

import os
import signal

import pytest

from shardwright.cluster.stopping import StopRequest

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_later_sigterms_change_nothing_and_a_second_sigint_acts_as_usual(first):
    # The shell's `&` has a program ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopRequest() as stop:
        assert stop.alone is None
        os.kill(os.getpid(), first)
        assert stop.alone == first.name
        os.kill(os.getpid(), signal.SIGTERM)  # as schedulers send at the end of the grace time
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
