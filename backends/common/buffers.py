"""Buffers of a module: restored after a block, and written without autograd noticing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...data.private_names import private_name

_preserve_versions = private_name(
    "torch.autograd.grad_mode", "_unsafe_preserve_version_counter", None
)


def write_unseen(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` into `tensors` without autograd noticing: a backward may follow that saved them
    and does not read their values."""
    if not tensors:
        return
    if _preserve_versions is None:  # slower, and `data` is a public name
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)
        return
    with torch.no_grad(), _preserve_versions(tuple(tensors)):
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
