"""Reads the data in a pickle without running any of it.

torch.distributed.checkpoint stores its index as a plain pickle of dataclasses, which torch's
weights-only unpickler does not read. Here `pickletools` lists the operations of the pickle, and
they are applied to inert records: no class is looked up, and no function is called.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint.storage.protocol import read_small
from ...kernel.errors import CheckpointDamaged

__all__ = ["Record", "read_records"]

_MAX_BYTES = 1 << 30


@dataclass(eq=False)
class Record:
    """An object in a pickle: the name of its class or function, with the arguments and the
    state."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> Any:
        """Return the only argument, such as that of `torch.Size`."""
        return self.args[0] if len(self.args) == 1 else self.args


_MARK = object()
_SIMPLE = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
}
_FILLED = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_IGNORED = ("PROTO", "FRAME", "STOP")
_CALLS = ("REDUCE", "NEWOBJ")
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_records(path: Path) -> Any:
    """Read a pickle file, with objects as records. Raises `CheckpointDamaged`."""
    try:
        return _Machine().run(read_small(path, _MAX_BYTES))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(
            f"{path}: is torn, or holds more than an index of tensors, and is not read; none of it "
            f"was run: {error!r:.200}"
        ) from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(data):
            self._act(operation.name, argument)
        (result,) = self.stack
        return result

    def _act(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _SIMPLE:
            stack.append(_SIMPLE[name])
        elif name in _FILLED:
            stack.append(_FILLED[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ") if name == "GLOBAL" else self._pop(2)
            stack.append(Record(".".join(map(str, parts))))
        elif name in _CALLS:
            called, args = self._pop(2)
            stack.append(Record(called.name, tuple(args)))
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        else:
            self._fill(name, argument)

    def _fill(self, name: str, argument: Any) -> None:
        """Apply operations that fill the object below on the stack, and operations that hold a
        value themselves."""
        stack = self.stack
        if name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._marked()
            stack[-1].extend(items)
        elif name == "ADDITEMS":
            stack[-1].update(self._marked())
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._marked()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "BUILD":
            (state,) = self._pop(1)
            if isinstance(stack[-1], Record) and isinstance(state, dict):
                stack[-1].state.update(state)
        elif isinstance(argument, str | int | float | bytes):
            stack.append(argument)
        else:
            raise ValueError(f"the operation {name} is not one of an index")

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count or any(each is _MARK for each in items):
            raise ValueError("its operations do not fit together")
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        place = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items
