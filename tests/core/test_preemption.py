"""Signals in a process of its own: at once where nothing would be lost, remembered otherwise, doubled ones count once."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from rlmodule.core.preemption import EXIT_CODE, NOTHING_SAVED

OPENING = """
import os, signal, time
from rlmodule.core import preemption
handler = preemption.PreemptionHandler()
handler.install()
me = os.getpid()
"""


def ends(body: str) -> tuple[int, str]:
    """(exit code, what it said) of a process that runs this."""
    code = OPENING + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_point_13_before_anything_was_trained_the_process_ends_at_once(number: signal.Signals) -> None:
    code, said = ends(f"os.kill(me, {int(number)}); time.sleep(60)")
    assert code == EXIT_CODE
    assert said == f"stopped: {number.name}: asked to stop; {NOTHING_SAVED}\n"


def test_point_13_while_something_is_unsaved_the_signal_is_remembered() -> None:
    code, said = ends(
        """
        handler.at_rest = None
        os.kill(me, signal.SIGTERM)
        print("goes on,", handler.signal_received.name)
        """
    )
    assert (code, said) == (0, "goes on, SIGTERM\n")


def test_point_13_a_signal_to_the_whole_group_that_is_passed_on_as_well_counts_once() -> None:
    code, said = ends(
        """
        handler.at_rest = None
        os.kill(me, signal.SIGTERM)
        os.kill(me, signal.SIGTERM)
        print("still there")
        """
    )
    assert (code, said) == (0, "still there\n")


def test_a_later_signal_ends_the_process_whatever_it_does() -> None:
    code, _ = ends(
        """
        preemption.REPEAT_SECONDS = 0.0
        handler.at_rest = None
        os.kill(me, signal.SIGTERM)
        time.sleep(0.01)
        os.kill(me, signal.SIGTERM)
        """
    )
    assert code == 128 + signal.SIGTERM


def test_afterwards_signals_mean_what_they_meant_before() -> None:
    code, _ = ends("handler.uninstall(); os.kill(me, signal.SIGTERM)")
    assert code == -signal.SIGTERM
