"""A pytest plugin: when a test runs into its time-out, each process that it has forked prints its
stacks. A test that hangs once in many runs leaves no other trace of where its ranks wait.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

ANSWERED = getattr(signal, "SIGRTMIN", 0) + 5
"""The signal at which forks of the test's process print their stacks. Nothing else uses it."""
STDERR = pytest.StashKey[int]()
PROCESSES = Path("/proc")


def pytest_configure(config: pytest.Config) -> None:
    """Answer the signal, also in forks. pytest does not capture what is written to this copy."""
    if hasattr(signal, "SIGRTMIN") and PROCESSES.is_dir():
        config.stash[STDERR] = os.dup(2)
        faulthandler.register(ANSWERED, file=config.stash[STDERR], all_threads=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if STDERR in config.stash:
        faulthandler.unregister(ANSWERED)
        os.close(config.stash[STDERR])


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    """Ask the forks when the alarm of pytest-timeout comes, before it ends the test."""
    result = yield
    ends_test = signal.getsignal(signal.SIGALRM)

    def ask(number: int, frame: FrameType | None) -> None:
        stderr = item.config.stash[STDERR]
        os.write(stderr, f"\n{item.nodeid} timed out. Its processes:\n".encode())
        for process in descendants(os.getpid()):
            show(process, stderr)
        assert callable(ends_test)
        ends_test(number, frame)

    if callable(ends_test) and STDERR in item.config.stash:
        signal.signal(signal.SIGALRM, ask)
    return result


def show(process: Path, stderr: int) -> None:
    """Print the process's command, and its stacks if it answers."""
    with suppress(OSError):  # it may have ended
        command = (process / "cmdline").read_text().replace("\0", " ").strip()
        os.write(stderr, f"\nprocess {process.name}, {command:.200}\n".encode())
        if answers(process):
            os.kill(int(process.name), ANSWERED)
            time.sleep(0.3)  # one after the other


def answers(process: Path) -> bool:
    """Return True for a process that catches the signal, which would end any other."""
    lines = (process / "status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (ANSWERED - 1) & 1)


def descendants(of: int) -> Iterator[Path]:
    """Yield the folders of all processes below one."""
    parents: dict[int, list[Path]] = {}
    for process in PROCESSES.glob("[0-9]*"):
        with suppress(OSError):
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(after_name[1]), []).append(process)
    waiting = [*parents.get(of, [])]
    while waiting:
        yield (process := waiting.pop(0))
        waiting += parents.get(int(process.name), [])
