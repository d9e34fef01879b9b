"""Functions on tensors and arrays nested in lists, tuples and dicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ...data.nested import leaves, like, map_leaves, map_tensors

__all__ = [
    "EvalLoopContainer",
    "denumpify_detensorize",
    "find_batch_size",
    "first_samples",
    "nested_concat",
    "nested_detach",
    "nested_gather",
    "nested_map",
    "nested_numpify",
    "nested_truncate",
    "pad_and_concatenate",
]


def nested_map(function: Callable[..., Any], *nests: Any, list_is_leaf: bool = False) -> Any:
    """Apply `function` to the leaves of several nests of the same structure, in containers of the
    same types. `list_is_leaf`: for lists that hold one item per sample. Raises TypeError if
    containers differ, and ValueError if lengths differ.
    """
    first, containers = nests[0], (Mapping, tuple) if list_is_leaf else (Mapping, tuple, list)
    if not any(isinstance(nest, containers) for nest in nests):
        return function(*nests)
    if any(type(nest) is not type(first) for nest in nests):
        raise TypeError(f"nests differ: {', '.join(type(n).__name__ for n in nests)}")
    inner = partial(nested_map, function, list_is_leaf=list_is_leaf)
    if isinstance(first, Mapping):
        parts = {key: inner(*(nest[key] for nest in nests)) for key in first}
        return type(first)(parts)  # type: ignore[call-arg]
    return like(first, (inner(*each) for each in zip(*nests, strict=True)))


def nested_detach(tensors: Any) -> Any:
    """Detach the tensors; other leaves are unchanged."""
    return map_tensors(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, tensors)


def nested_numpify(tensors: Any) -> Any:
    """Convert to arrays on the host; bfloat16, which numpy lacks, becomes float32."""
    return map_tensors(_numpify, tensors)


def _numpify(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def nested_truncate(tensors: Any, limit: int) -> Any:
    """Return the first `limit` samples of every leaf."""
    return map_leaves(lambda t: t[:limit], tensors)


def nested_concat(tensors: Any, new_tensors: Any, padding_index: float = -100) -> Any:
    """Concatenate both along dimension 0; see `pad_and_concatenate`."""
    return nested_map(
        lambda *leaves: pad_and_concatenate(leaves, padding_index), tensors, new_tensors
    )


def pad_and_concatenate(parts: Sequence[Any], padding_index: float = -100) -> Any:
    """Concatenate tensors, or arrays, along dimension 0. If dimension 1 differs, narrower ones are
    padded at its end; a number counts as one sample. Raises TypeError for anything else, or a mix.
    """
    join: Callable[..., Any]
    filled: Callable[..., Any]
    if all(isinstance(part, torch.Tensor) for part in parts):
        join, filled = torch.cat, parts[0].new_full
    elif all(isinstance(part, np.ndarray | np.generic) for part in parts):
        join, filled = np.concatenate, partial(np.full, dtype=parts[0].dtype)
    else:
        kinds = sorted({type(part).__name__ for part in parts})
        raise TypeError(
            f"to be joined, all must be tensors or all arrays, not {', '.join(kinds)}: of outputs "
            "of the model, name those that are neither in ignore_keys of evaluate or predict"
        )
    parts = [part if part.ndim else part.reshape(1) for part in parts]
    if parts[0].ndim == 1 or len({part.shape[1] for part in parts}) == 1:
        return join(parts)
    width = max(part.shape[1] for part in parts)
    whole = filled((sum(map(len, parts)), width, *parts[0].shape[2:]), padding_index)
    row = 0
    for part in parts:
        whole[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return whole


def first_samples(inputs: Any, count: int, size: int) -> Any:
    """Return the first `count` of the `size` samples of a batch; the whole batch for 0, or if a
    part of it does not hold one item per sample, as with pairs of answers.
    """
    if not 0 < count < size or find_batch_size(inputs) != size or not isinstance(inputs, Mapping):
        return inputs
    tensors = [each for each in inputs.values() if isinstance(each, torch.Tensor) and each.dim()]
    others = [each for each in inputs.values() if isinstance(each, Mapping | tuple)]
    if others or any(len(each) != size for each in tensors):
        return inputs
    return {
        name: each[:count] if _is_by_sample(each, size) else each for name, each in inputs.items()
    }


def _is_by_sample(value: Any, size: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, list) and len(value) == size


def find_batch_size(tensors: Any) -> int | None:
    """Return the first dimension of the first leaf that has one, or None."""
    if isinstance(tensors, (torch.Tensor, np.ndarray)):
        return int(tensors.shape[0]) if tensors.ndim else None
    parts: Iterable[Any] = ()
    if isinstance(tensors, (tuple, list)):
        parts = tensors
    elif type(tensors) is dict or isinstance(tensors, Mapping):
        parts = tensors.values()
    for part in parts:
        if (size := find_batch_size(part)) is not None:
            return size
    return None


def nested_gather(tensors: Any, parallel_mode: Any = None, name: str | None = None) -> Any:
    """Gather every rank's tensors along dimension 0 on every rank; sizes must agree over ranks.

    Without a process group, return the tensors. `parallel_mode` and `name` are accepted for callers
    that pass them, and ignored: the process group decides.
    """
    from torch import distributed

    if tensors is None or not (distributed.is_available() and distributed.is_initialized()):
        return tensors

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.reshape(tensor.shape or 1).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, mine)
        return torch.cat(everyone)

    return map_leaves(gathered, tensors)


def denumpify_detensorize(metrics: Any) -> Any:
    """Convert numpy scalars and tensors of one element to Python numbers."""

    def number(value: Any) -> Any:
        single = isinstance(value, torch.Tensor) and value.numel() == 1
        return value.item() if single or isinstance(value, np.generic) else value

    return map_leaves(number, metrics)


_JOINED_FIRST = 4 << 20
"""Bytes of small batches to join before a copy: the call dominates the cost of small copies."""


class EvalLoopContainer:
    """Collects the results of evaluation batch by batch.

    `do_nested_concat`: keep one nest of arrays over all samples, else a list with one nest per
    batch. `lists_of_samples`: a list holds one item per sample, else one item per output.
    """

    def __init__(
        self,
        do_nested_concat: bool = True,
        padding_index: float = -100,
        lists_of_samples: bool = False,
    ) -> None:
        self.do_nested_concat = do_nested_concat
        self.padding_index = padding_index
        self.lists_of_samples = lists_of_samples
        self._on_device: deque[Any] = deque()
        self._on_host: list[Any] = []

    def add(self, tensors: Any) -> None:
        """Add the tensors of one batch."""
        self._on_device.append(tensors)

    def to_cpu_and_numpy(self) -> None:
        """Move all added tensors to the host as arrays, and free their device memory."""
        waiting, size = self._on_device, 1
        if self.do_nested_concat and waiting:
            num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves(waiting[0]))
            size = max(1, _JOINED_FIRST // max(1, num_bytes))
        while waiting:
            some = [waiting.popleft() for _ in range(min(size, len(waiting)))]
            self._on_host.append(nested_numpify(self._joined(some)))

    def get_arrays(self) -> Any:
        """Return everything added, as arrays on the host; None if nothing was added."""
        self.to_cpu_and_numpy()
        if not self.do_nested_concat:
            return self._on_host or None
        if self._on_host:  # joined once, so that the cost is linear in the data
            self._on_host = [self._joined(self._on_host)]
        return self._on_host[0] if self._on_host else None

    def _joined(self, nests: Sequence[Any]) -> Any:
        if len(nests) == 1:
            return nests[0]
        return nested_map(self._join_samples, *nests, list_is_leaf=self.lists_of_samples)

    def _join_samples(self, *parts: Any) -> Any:
        if all(isinstance(part, list) for part in parts):
            return list(chain(*parts))
        return pad_and_concatenate(parts, self.padding_index)
