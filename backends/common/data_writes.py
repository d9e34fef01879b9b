"""Writes to weights by way of `weight.data`, which count in no version of a weight.

What `weight.data` returns has a version of its own. It is noted for a while, and compared. Nothing
is computed, and no device is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["DataWrites", "noting_data", "noting_writes"]

_DATA: Any = Tensor.data
_LIBRARIES = ("deepspeed", "torch.distributed", "torch.autograd", "torch.nn.parallel", __package__)


class DataWrites:
    """The parameters whose `data` user's code wrote to, or assigned."""

    def __init__(self) -> None:
        self.written: set[int] = set()
        """Ids of the parameters."""
        self.replaced: dict[int, Tensor] = {}
        """The first `data` of each parameter whose `data` was assigned, by its id."""
        self._shown: dict[int, list[tuple[Tensor, int]]] = {}

    def shown(self, parameter: Tensor, data: Tensor) -> None:
        """Note that user's code has read `parameter.data`."""
        if not data.is_inference():  # which has no version
            self._shown.setdefault(id(parameter), []).append((data, data._version))

    def assigned(self, parameter: Tensor, data: Tensor) -> None:
        """Note that user's code has assigned `parameter.data`, which was `data`."""
        self.written.add(id(parameter))
        self.replaced.setdefault(id(parameter), data)

    def take(self) -> set[int]:
        """Return the ids of the parameters that were written to, and start over."""
        self.settle()
        written, self.written = self.written, set()
        return written

    def settle(self, *parameters: int) -> None:
        """Compare what was shown of these parameters, or of all, and hold it no longer."""
        for key in parameters or [*self._shown]:
            shown = self._shown.pop(key, [])
            if any(data._version != version for data, version in shown):
                self.written.add(key)


_active: list[DataWrites] = []


@contextmanager
def noting_data(kind: type[Tensor] = nn.Parameter) -> Iterator[DataWrites]:
    """Note within the block which parameters of a class user's code writes to by `data`."""
    changed: Any = kind
    _active.append(noted := DataWrites())
    outermost = "data" not in vars(kind)
    if outermost:
        changed.data = property(_get, _set)
    try:
        yield noted
    finally:
        _active.remove(noted)
        if outermost:
            del changed.data
        noted.settle()


@contextmanager
def noting_writes(named: Mapping[str, nn.Parameter], keep_memory: bool) -> Iterator[set[str]]:
    """Note within the block to which of these parameters user's code writes; the set that is
    returned has their names after the block. `keep_memory`: what was assigned to `weight.data` is
    copied into the memory that the parameter had."""
    before = {name: parameter._version for name, parameter in named.items()}
    written: set[str] = set()
    with noting_data() as noted:
        yield written
    for name, parameter in named.items():
        memory = noted.replaced.get(id(parameter)) if keep_memory else None
        if memory is not None and memory.data_ptr() != parameter.data_ptr():
            parameter.data = memory.copy_(parameter.data)
        if parameter._version != before[name] or id(parameter) in noted.written:
            written.add(name)


def _get(parameter: Tensor) -> Tensor:
    data: Tensor = _DATA.__get__(parameter)
    if not _is_library(sys._getframe(1)):
        for noted in _active:
            noted.shown(parameter, data)
    return data


def _set(parameter: Tensor, value: Tensor) -> None:
    for noted in _active:
        noted.settle(id(parameter))  # a library frees the memory of gathered weights so
        if not _is_library(sys._getframe(1)):
            noted.assigned(parameter, _DATA.__get__(parameter))
    _DATA.__set__(parameter, value)


def _is_library(frame: Any) -> bool:
    """True for a frame of code that moves weights itself, as gathering them does."""
    return str(frame.f_globals.get("__name__")).startswith(_LIBRARIES)
