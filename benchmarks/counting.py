"""Counts that noise cannot move: calls, tensor operations, files opened, bytes read."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

INLINED = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})
"""Functions of their own up to Python 3.11, and none from 3.12 on."""
ASKED_IN_A_WAIT = "lost_ranks.py"
"""The module that a rank asks again and again while it waits for others: the more often, the longer
they take.
"""
WAITING = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "equal"})
"""Operations that hand a value of the device to the host."""


@dataclass
class Calls:
    """Python functions called, without comprehensions and what depends on other ranks' time."""

    own: int = 0
    """Functions of drivetrain."""
    all: int = 0


@contextmanager
def calls() -> Iterator[Calls]:
    """Count the calls of this thread within the block."""
    folders = tuple(
        str(Path(path).resolve()) + os.sep
        for name, module in list(sys.modules.items())
        if name.startswith("drivetrain.") and name.count(".") == 1
        for path in getattr(module, "__path__", ())
    )
    count, counted = Calls(), dict[CodeType, tuple[int, int]]()

    def count_of(code: CodeType) -> tuple[int, int]:
        """Return by how much a call raises the counts of own functions, and of all."""
        in_a_wait = os.path.basename(code.co_filename) == ASKED_IN_A_WAIT
        if in_a_wait or code.co_name in INLINED:
            return 0, 0
        return int(os.path.realpath(code.co_filename).startswith(folders)), 1

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code not in counted:
            counted[code] = count_of(code)
        own, one = counted[code]
        count.own += own
        count.all += one

    gc.collect()
    gc.disable()  # what is finalised when it runs would count
    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(None)
        gc.enable()


class Operations(TorchDispatchMode):
    """Tensor operations within a `with`, those of the backward included, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    @property
    def all(self) -> int:
        return self.by_name.total()

    @property
    def waits(self) -> int:
        return sum(self.by_name[name] for name in WAITING)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.by_name[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Reads:
    """Files below a folder that were opened, and bytes read, from anywhere."""

    opened: Counter[str] = field(default_factory=Counter)
    """How often, by path."""
    bytes: int = 0
    """Known after the block."""


@contextmanager
def reads(folder: Path) -> Iterator[Reads]:
    """Count the files below a folder that this process opens within the block, and the bytes that
    it reads (Linux only).
    """
    root, count, is_on = str(folder.resolve()), Reads(), True

    def on_audit(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path.startswith(root) and not os.path.isdir(path):
                count.opened[path] += 1

    sys.addaudithook(on_audit)  # which stays as long as the process
    before = _bytes_read()
    try:
        yield count
    finally:
        is_on, count.bytes = False, _bytes_read() - before


def _bytes_read() -> int:
    """Return the bytes that this process has read since it began."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "rchar":
            return int(value)
    raise OSError("/proc/self/io has no rchar")
