"""The autograd graph of a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor

__all__ = ["nodes_of"]


def nodes_of(loss: Tensor, barriers: Collection[str] = ()) -> Iterator[Any]:
    """Yield the autograd nodes of a loss, the last operations first, without passing nodes that
    have the name of a barrier.
    """
    waiting, seen = deque([loss.grad_fn]), set()
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen or node.name() in barriers:
            continue
        seen.add(node)
        yield node
        waiting.extend(each for each, _ in node.next_functions)
