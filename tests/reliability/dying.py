"""Interposition: something happens to a process at a chosen call that a save makes to the operating
system.

Only calls that change the folder of checkpoints, or make it durable, are counted. fsync does
nothing here: a killed process loses nothing that it has written, and another test checks that
everything is synced before the commit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CALLS = ("open", "write", "fsync", "mkdir", "link", "rename", "unlink", "rmdir")
Moment = Literal["before", "half-way", "after"]
Act = Callable[[str, Callable[..., Any]], None]
"""Called before each counted call, with its name and a function that makes it. `do(half=True)`
writes half of the data; calls other than writes are made whole.
"""


@contextmanager
def interposed(folder: Path, act: Act) -> Iterator[None]:
    """Call `act` before each counted call of this process, in any thread, within the block."""
    inside: set[int] = set()
    before = {name: getattr(os, name) for name in (*CALLS, "close")}
    real = {**before, "fsync": lambda fd: None}

    def concerns(target: Any, dir_fd: int | None = None, **others: Any) -> bool:
        if isinstance(target, int):
            return target in inside
        return dir_fd in inside or Path(target).is_relative_to(folder)

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        def do(half: bool = False) -> Any:
            if half and name == "write":
                return real[name](args[0], args[1][: len(args[1]) // 2])
            return real[name](*args, **kwargs)

        concerned = concerns(args[0], **kwargs)
        reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
        if concerned and not reads:
            act(name, do)
        result = do()
        if name == "open" and concerned:
            inside.add(result)
        return result

    def close(fd: int) -> None:
        inside.discard(fd)
        before["close"](fd)

    def interposer(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(name, *args, **kwargs)

    for name in CALLS:
        setattr(os, name, interposer(name))
    os.close = close
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(os, name, function)


@dataclass(frozen=True)
class Death:
    """SIGKILL that a process sends to itself, in its `at`-th call."""

    at: int
    moment: Moment

    def act(self) -> Act:
        calls = iter(range(1, sys.maxsize))

        def act(name: str, do: Callable[..., Any]) -> None:
            if next(calls) != self.at:
                return
            if self.moment != "before":
                do(half=self.moment == "half-way")
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # in a thread, it may run for a moment more

        return act
