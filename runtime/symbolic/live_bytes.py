"""Counts the bytes of all tensors that are alive, after each operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..data.nested import tensors_of
from .modes import Mode, is_plain

__all__ = ["LiveBytes", "UnknownMemory"]

_COMMUNICATING = ("c10d", torch.ops.fsdp.name)
"""Parts of the namespaces of operators that send, and that copy from and to what is sent."""
_HIDING = frozenset({"mkldnn_rnn_layer"})
"""Operators whose workspace has no size until they run."""


Observe = Callable[[str, Any, Any, Any, Any], object]


class UnknownMemory(Exception):
    """An operator needs memory whose size is not known without running it."""


class _Storage:
    """The memory of one or more tensors."""

    __slots__ = ("kind", "num_bytes", "phase")

    def __init__(self, num_bytes: int, phase: str) -> None:
        self.num_bytes, self.phase, self.kind = num_bytes, phase, ""


class LiveBytes(Mode):
    """A mode in which the storages of a device are counted, from the operation that makes them
    until they are freed.

    Each has a kind, which the caller names. Without one it is `temporary`, or, if an operator that
    communicates has used it, `communication`. `observe(phase, func, args, kwargs, result)` is
    called after each operation."""

    def __init__(self, device_type: str, observe: Observe = lambda *operation: None) -> None:
        self.device_type, self._observe = device_type, observe
        self.phase = ""
        """The present activity: a name of the caller's."""
        self._total, self._peak = 0, -1
        self._live: dict[int, _Storage] = {}
        self._at_peak: list[tuple[_Storage, int]] = []
        self._patched = ExitStack()

    def start(self) -> None:
        """Look for the peak from now on."""
        self._peak = -1
        self._look()

    def peak(self) -> dict[str, int]:
        """Return the bytes at the peak since `start`, by kind."""
        found = Counter[str]()
        for storage, num_bytes in self._at_peak:
            found[storage.kind or "temporary"] += num_bytes
        return dict(found)

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as of this kind, unless they have one."""
        for plain in (each for tensor in tensors for each in _plain(tensor)):
            known = self._live.get(id(plain.untyped_storage()))
            if known is not None and known.kind in ("", "communication"):
                known.kind = kind

    def name_kept(self, kind: str, phase: str) -> None:
        """Count as of this kind what was made in `phase` and is still alive, unless it has one."""
        for storage in self._live.values():
            if storage.phase == phase and not storage.kind:
                storage.kind = kind

    def __enter__(self) -> LiveBytes:
        resize, look = torch.UntypedStorage.resize_, self._look

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if (known := self._live.get(id(storage))) is not None:
                self._total += storage.nbytes() - known.num_bytes
                known.num_bytes = storage.nbytes()
                look()
            return done

        self._patched.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patched.close()

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See `Mode`."""
        if not all(map(is_plain, types)):
            return NotImplemented
        if func.overloadpacket.__name__ in _HIDING:
            raise UnknownMemory(f"{func} keeps a workspace whose size is not known before it runs")
        result = func(*args, **kwargs)
        sends = any(part in func.namespace for part in _COMMUNICATING)
        for value in tensors_of([args, kwargs, result] if sends else result):
            for plain in _plain(value):
                if plain.device.type == self.device_type:
                    self._count(plain.untyped_storage(), "communication" if sends else "")
        self._look()
        self._observe(self.phase, func, args, kwargs, result)
        return result

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)  # torch keeps the object as long as the memory
        known = self._live.get(key)
        if known is None:
            known = self._live[key] = _Storage(storage.nbytes(), self.phase)
            self._total += known.num_bytes
            weakref.finalize(storage, self._free, key).atexit = False
        known.kind = known.kind or kind

    def _free(self, key: int) -> None:
        self._total -= self._live.pop(key).num_bytes

    def _look(self) -> None:
        if self._total > self._peak:
            self._peak = self._total
            self._at_peak = [(each, each.num_bytes) for each in self._live.values()]


def _plain(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory that a tensor is made of."""
    if is_plain(type(tensor)) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):
            yield from _plain(part)
