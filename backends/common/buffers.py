"""Buffers of a module: kept as they are, and written without autograd noticing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def write_unseen(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Unseen by autograd: a backward may follow that was given them, and does not look at them."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        torch._foreach_copy_(list(tensors), list(values))


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """What is done inside leaves the buffers as they were."""
    buffers = [buffer.detach() for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        write_unseen(buffers, before)
