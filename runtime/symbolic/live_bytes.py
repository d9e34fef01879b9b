"""Counts the bytes of all tensors that are alive, after each operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..data.nested import tensors_of
from .modes import Mode, is_plain
from .trace import Message, Operation, Trace

__all__ = ["LiveBytes", "UnknownMemory"]

_COMMUNICATING = ("c10d", torch.ops.fsdp.name)
"""Parts of the namespaces of operators that send, and that copy from and to what is sent."""
_HIDING = frozenset({"mkldnn_rnn_layer"})
"""Operators whose workspace has no size until they run."""

Observe = Callable[[str, Any, Any, Any, Any], Operation | Message | None]


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
    communicates has used it, `communication`. `observe(phase, func, args, kwargs, result)` returns
    the work of an operation that was run, if it is to be counted."""

    def __init__(self, device_type: str, observe: Observe = lambda *operation: None) -> None:
        self.device_type, self._observe = device_type, observe
        self.phase = ""
        """The present activity: a name of the caller's."""
        self._live: dict[int, _Storage] = {}
        self._names: list[tuple[str, str]] = []
        self._work: list[Operation | Message | None] = []
        self._changes: list[tuple[int, _Storage, int]] = []
        """Moment, storage, and the bytes by which it becomes larger."""
        self._patched = ExitStack()

    def start(self) -> None:
        """List operations and memory from now on."""
        self._names, self._work = [], []
        self._changes = [(0, each, each.num_bytes) for each in self._live.values()]
        self._add_moment("", None)

    def trace(self, kinds: Sequence[str]) -> Trace:
        """Return the moments since `start`, of which the first has no operation. Called outside of
        this mode, and of those in which tensors have no elements."""
        columns = {kind: column for column, kind in enumerate(kinds)}
        changes = torch.zeros(len(self._names) + 1, len(kinds), dtype=torch.int64)
        places = [
            (moment, columns[storage.kind or "temporary"]) for moment, storage, _ in self._changes
        ]
        if places:
            sizes = torch.tensor([num_bytes for _, _, num_bytes in self._changes])
            changes.index_put_((*torch.tensor(places).T,), sizes, accumulate=True)
        return Trace(self._names, self._work, kinds, changes[:-1].cumsum(0))

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
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if (known := self._live.get(id(storage))) is not None:
                self._add_moment("resize_", None)
                self._change(known, storage.nbytes() - known.num_bytes)
                known.num_bytes = storage.nbytes()
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
        name = func.overloadpacket.__name__
        self._add_moment(name, self._observe(self.phase, func, args, kwargs, result))
        sends = any(part in func.namespace for part in _COMMUNICATING)
        for value in tensors_of([args, kwargs, result] if sends else result):
            for plain in _plain(value):
                if plain.device.type == self.device_type:
                    self._count(plain.untyped_storage(), "communication" if sends else "")
        return result

    def _add_moment(self, name: str, work: Operation | Message | None) -> None:
        self._names.append((self.phase, name))
        self._work.append(work)

    def _change(self, storage: _Storage, num_bytes: int, after: int = 0) -> None:
        """Note that a storage becomes larger at the present moment, or at one after it."""
        self._changes.append((len(self._names) - 1 + after, storage, num_bytes))

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)  # torch keeps the object as long as the memory
        known = self._live.get(key)
        if known is None:
            known = self._live[key] = _Storage(storage.nbytes(), self.phase)
            self._change(known, known.num_bytes)
            weakref.finalize(storage, self._free, key).atexit = False
        known.kind = known.kind or kind

    def _free(self, key: int) -> None:
        storage = self._live.pop(key)
        self._change(storage, -storage.num_bytes, after=1)


def _plain(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory that a tensor is made of."""
    if is_plain(type(tensor)) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):
            yield from _plain(part)
