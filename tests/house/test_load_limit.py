"""A test begins once the run's own processes leave room for it, in scratch suites."""

from __future__ import annotations

from pathlib import Path

import pytest
from scratch_suites import last_line, run

COMPUTES = """
import os, subprocess, sys, time
from pathlib import Path
import load_limit

def test_computes():
    while not Path("begun").exists():
        time.sleep(0.01)
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(load_limit.MOST + 2)]
    while load_limit.runnable_below(os.getppid()) <= load_limit.MOST:
        time.sleep(0.01)
    Path("busy").touch()
    deadline = time.monotonic() + {seconds}
    while not Path("looked").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    Path("busy").unlink()
    for loop in loops:
        loop.kill()
        loop.wait()
"""
COMES_LATER = """
import time
from pathlib import Path

def test_begins_beside_the_other():
    Path("begun").touch()
    while not Path("busy").exists():
        time.sleep(0.01)

def test_begins_when_there_is_room():
    is_busy = Path("busy").exists()
    Path("looked").touch()
    assert not is_busy
"""


@pytest.mark.parametrize(
    ("plugin", "seconds", "outcome"),
    [("load_limit", 1, "3 passed"), ("second_look", 120, "2 passed, 1 unstable")],
)
def test_a_test_waits_until_others_have_computed(
    tmp_path: Path, plugin: str, seconds: int, outcome: str
) -> None:
    """Without the limit the test fails beside the other, and passes alone. `seconds`: the longest
    time that the other computes, while nobody looks."""
    computes = COMPUTES.replace("{seconds}", str(seconds))
    suite = {"test_a.py": computes, "test_b.py": COMES_LATER}
    _, printed = run(tmp_path, suite, plugin=plugin)
    assert last_line(printed) == outcome, printed
