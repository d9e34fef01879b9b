"""Buffers of a module: restored after a block, and written without autograd noticing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def write_unseen(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `tensors` without autograd noticing: a backward may follow that saved them
    and does not read their values."""
    if tensors:
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
            torch._foreach_copy_(list(tensors), list(values))


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers when the block ends."""
    buffers = [buffer.detach() for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        write_unseen(buffers, before)
