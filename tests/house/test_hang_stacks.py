"""A test that hangs prints where each of its forks is, in scratch suites."""

from __future__ import annotations

from pathlib import Path

from scratch_suites import run

HANGS = """
import multiprocessing, subprocess, sys, threading, time

def waits_in_a_thread():
    time.sleep(600)

def waits_forever():
    threading.Thread(target=waits_in_a_thread, daemon=True).start()
    time.sleep(600)

def test_hangs():
    fork = multiprocessing.get_context("fork").Process(target=waits_forever, daemon=True)
    fork.start()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        fork.join()
    finally:
        assert other.poll() is None  # it does not know the signal, which would have ended it
        other.kill()
"""


def test_forks_of_a_test_that_hangs_print_their_stacks(tmp_path: Path) -> None:
    options = ("-p", "pytest_timeout", "--timeout", "3")
    status, printed = run(tmp_path, {"test_hangs.py": HANGS}, *options, plugin="hang_stacks")
    assert status == 1
    assert "Failed: Timeout (>3.0s)" in printed and "AssertionError" not in printed
    assert "test_hangs.py::test_hangs timed out. Its processes:" in printed
    assert "in waits_forever" in printed
    assert "in waits_in_a_thread" in printed
    assert "import time; time.sleep(600)" in printed
