"""DistributedDataParallel for tensors without elements, which torch's own reducer would read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["fake_replicas"]

_BUCKET_MIB = 25
"""The default size of a bucket:
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.
"""


@contextmanager
def fake_replicas() -> Iterator[None]:
    """Within the block, DistributedDataParallel keeps what it would keep in memory, and sends what
    it would send."""
    replaced: dict[str, Any] = {"__init__": _init, "forward": _forward}
    replaced["_set_static_graph"] = _do_nothing
    with patch.multiple(DistributedDataParallel, **replaced):
        yield


def _init(self: Any, module: nn.Module, **arguments: Any) -> None:
    nn.Module.__init__(self)
    self.module, self.require_backward_grad_sync = module, True
    limit = int((arguments.get("bucket_cap_mb") or _BUCKET_MIB) * 2**20)
    self.reducer = _Reducer(self, arguments.get("process_group"), limit)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


class _Bucket:
    """Memory of gradients that are sent together."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        first, sizes = parameters[0], [each.numel() for each in parameters]
        self.memory = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = dict(zip(parameters, torch.split(self.memory, sizes), strict=True))
        self.num_missing = len(self.views)


class _Reducer:
    """Holds the buckets, in which all gradients lie after a backward that sends them."""

    def __init__(self, ddp: Any, group: Any, limit: int) -> None:
        self._ddp, self._group = ddp, group
        self._bucket_of: dict[Any, _Bucket] = {}
        for parameters in _buckets(ddp.module, limit):
            self._bucket_of |= dict.fromkeys(parameters, _Bucket(parameters))
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._move)

    def _move(self, parameter: Tensor) -> None:
        if not self._ddp.require_backward_grad_sync:
            return
        assert parameter.grad is not None
        bucket = self._bucket_of[parameter]
        view = bucket.views[parameter].view_as(parameter)
        view.copy_(parameter.grad)
        parameter.grad = view
        bucket.num_missing -= 1
        if not bucket.num_missing:
            bucket.num_missing = len(bucket.views)
            dist.all_reduce(bucket.memory, group=self._group)

    def __getattr__(self, name: str) -> Any:
        return _do_nothing


def _buckets(module: nn.Module, limit: int) -> Iterator[list[Any]]:
    """Yield trained parameters that fit into a bucket of `limit` bytes, the last ones first."""
    bucket: list[Any] = []
    for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
        if bucket and (
            parameter.dtype != bucket[0].dtype
            or sum(each.nbytes for each in (*bucket, parameter)) > limit
        ):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _do_nothing(*args: Any) -> None:
    """Stand in for what has no effect on memory."""
