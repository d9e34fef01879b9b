"""A pytest plugin: a worker begins a test only when the run's own processes leave room for it.

Each worker may start several ranks, each of which imports torch. Too many at once are no quicker,
since the processors are busy anyway, but let ranks wait for each other longer than tests expect.
What other programs do is not counted, so a busy machine does not stop the tests.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Generator
from pathlib import Path

import pytest

MOST = 2 * (os.cpu_count() or 1)
"""Processes of the run that may want to compute when a test begins."""
LOAD = Path("/proc/loadavg")
CHANCE = random.Random()  # not the generator of the process, which tests may have seeded
LONGEST_WAIT_SECONDS = 60.0
"""A test begins after these seconds, whatever else is computing."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout starts its clock
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for room, where several workers run tests, and the system shows what computes."""
    if hasattr(item.config, "workerinput") and LOAD.exists():
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        # first all of the machine, which takes reading a line
        while runnable() > MOST and runnable_below(os.getppid()) > MOST:
            if time.monotonic() > deadline:
                break
            time.sleep(CHANCE.uniform(0.5, 1.0))  # workers would otherwise begin together
    return (yield)


def runnable() -> int:
    """Return the number of threads of this machine that compute or could."""
    return int(LOAD.read_text().split()[3].partition("/")[0])


def runnable_below(ancestor: int) -> int:
    """Return the number of processes that compute or could, of those that a process and its
    children have started.
    """
    parents: dict[int, int] = {}
    runs = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # not by `Path`: it is asked often
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                stat = file.read()
        except OSError:  # it has ended
            continue
        # the name of the program, in brackets, may hold spaces
        state, parent, _ = stat[stat.rindex(b")") + 1 :].split(None, 2)
        parents[int(name)] = int(parent)
        if state == b"R":
            runs.append(int(name))
    return sum(descends(process, ancestor, parents) for process in runs)


def descends(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    """Return True if `ancestor` has started a process, or a process that did."""
    for _ in parents:  # no longer: a number may have passed to another process meanwhile
        process = parents.get(process, 0)
        if process in (ancestor, 0):
            break
    return process == ancestor
