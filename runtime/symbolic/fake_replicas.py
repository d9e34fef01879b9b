"""DistributedDataParallel for tensors without elements, which torch's own reducer would read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["fake_replicas"]


@contextmanager
def fake_replicas() -> Iterator[None]:
    """Within the block, DistributedDataParallel keeps what it would keep in memory, and averages
    nothing."""
    replaced: dict[str, Any] = {"__init__": _init, "forward": _forward}
    replaced["_set_static_graph"] = _do_nothing
    with patch.multiple(DistributedDataParallel, **replaced):
        yield


def _init(self: Any, module: nn.Module, **arguments: Any) -> None:
    nn.Module.__init__(self)
    self.module, self.require_backward_grad_sync = module, True
    self.reducer = _Reducer(self)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


class _Reducer:
    """Holds the buckets, in which all gradients lie after a backward that sends them."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._buckets: dict[Tensor, Tensor] = {}
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                self._buckets[parameter] = torch.zeros_like(parameter)
                parameter.register_post_accumulate_grad_hook(self._move)

    def _move(self, parameter: Tensor) -> None:
        if self._ddp.require_backward_grad_sync:
            assert parameter.grad is not None
            self._buckets[parameter].copy_(parameter.grad)
            parameter.grad = self._buckets[parameter].view_as(parameter)

    def __getattr__(self, name: str) -> Any:
        return _do_nothing


def _do_nothing(*args: Any) -> None:
    """Stand in for what has no effect on memory."""
