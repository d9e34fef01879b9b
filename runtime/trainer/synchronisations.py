"""Finds the lines of a recipe at which the host waits for the device, such as `.item()`."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from ..data.operations import replacing_operations
from ..data.user_frames import user_line
from .time_verdicts import Synchronisation

__all__ = ["SynchronisationFinder"]

_WAITING = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "nonzero"})
"""Operations that hand a value of the device to the host, or need one to continue."""


class SynchronisationFinder:
    """Within its `with`, counts the operations for which the host waits, by line of the user's
    code; on a host without a device, those that would wait on one. Raises `LibraryUnsupported` if
    this torch cannot show its operations."""

    def __init__(self) -> None:
        self._counts, self._seconds = Counter[str](), defaultdict[str, float](float)
        self._mode: Any = None

    def __enter__(self) -> None:
        self._mode = replacing_operations(self._run, "find_synchronisations")
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        if name not in _WAITING and not (name == "_to_copy" and _leaves_a_device(args, kwargs)):
            return func(*args, **kwargs)
        began = time.perf_counter()
        result = func(*args, **kwargs)
        # drivetrain's own code waits of its own accord
        if place := user_line(sys._getframe(2)):
            self._counts[place] += 1
            self._seconds[place] += time.perf_counter() - began
        return result

    def forget(self) -> None:
        """Forget the lines found so far."""
        self._counts.clear()
        self._seconds.clear()

    def found(self) -> list[Synchronisation]:
        """The lines found so far."""
        return [
            Synchronisation(place, count, self._seconds[place])
            for place, count in self._counts.items()
        ]


def _leaves_a_device(args: Any, kwargs: Any) -> bool:
    target = kwargs.get("device")
    source = args[0] if args else None
    return (
        isinstance(source, Tensor)
        and source.device.type != "cpu"
        and target is not None
        and torch.device(target).type == "cpu"
    )
