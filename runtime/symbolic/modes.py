"""Modes of torch, in which a program sees or replaces each operation. torch documents them without
exporting them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from ..data.fork_gc import stay_forkable
from ..data.operations import replacing_operations

__all__ = ["Mode", "fake_mode", "is_fake", "many_known_numbers", "without_modes"]

_MOST_KNOWN = 4096


class Mode:
    """A context in which `run` is called in place of each operation, other than those that only ask
    for a tensor's device."""

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See `replacing_operations`."""
        raise NotImplementedError

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default and is_fake(args[0]):
            return args[0].fake_device  # most operations are no more than this
        return self.run(func, types, args, kwargs)

    def __enter__(self) -> Any:
        self._mode: Any = replacing_operations(self._run, "running a step without memory")
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


def without_modes() -> AbstractContextManager[None]:
    """Enclose operations on tensors with elements."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[None] = _disable_current_modes()
    return context


@cache
def _fake_tensors() -> Any:
    from torch._subclasses import fake_tensor

    return fake_tensor


def fake_mode() -> Any:
    """Return a mode in which tensors have no elements (`FakeTensorMode`)."""
    stay_forkable()
    return _fake_tensors().FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Return True for a tensor without elements."""
    return isinstance(value, _fake_tensors().FakeTensor)


def is_plain(kind: type) -> bool:
    """Return True for the type of a tensor that is not made of others, as a `DTensor` is."""
    return kind in (torch.Tensor, torch.nn.Parameter, _fake_tensors().FakeTensor)


def many_known_numbers() -> AbstractContextManager[Any]:
    """Enclose a program that makes tensors of lists of numbers, and reads them again: torch
    remembers the numbers of longer lists than otherwise."""
    return patch.object(_fake_tensors(), "CONSTANT_NUMEL_LIMIT", _MOST_KNOWN)
