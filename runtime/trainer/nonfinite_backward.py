"""Finds the first gradient of a backward that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from .nonfinite_trace import Call, Trace
from .nonfinite_values import Origin, not_finite, place_of, ranges_of, rows_of, values_of

__all__ = ["run_backward"]

_REENTRANT = f"{CheckpointFunction.__name__}Backward"


def run_backward(trace: Trace, loss: Tensor, weight: Tensor) -> Origin | None:
    """Run the backward of `weight * loss`, and keep no gradient. Return the origin of the first
    gradient of a weight that is not finite; None if all are finite.

    `trace` has watched the forward, with its nodes. Raises `NotImplementedError` for a graph whose
    backward keeps gradients by itself.
    """
    assert loss.grad_fn is not None
    graph = list(_reachable(loss.grad_fn))
    if any(node.name() == _REENTRANT for node in graph):
        raise NotImplementedError(
            "torch.utils.checkpoint with use_reentrant=True keeps the gradients of a backward"
        )
    search = _Search(trace)
    weights = [node for node in graph if hasattr(node, "variable")]
    hooks = [node.register_hook(search.watch(node)) for node in graph]
    hooks += [node.variable.register_hook(search.watch_weight(node)) for node in weights]
    try:
        torch.autograd.grad(loss, [node.variable for node in weights], weight, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return search.found


class _Search:
    """The origins of gradients that are on their way to a node of the graph."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.found: Origin | None = None
        self._order = 0
        self._arriving: dict[Node, Origin] = {}

    def watch(self, node: Node) -> Any:
        """Return a hook for after this node has run."""

        def ran(computed: Sequence[Any], arrived: Sequence[Any]) -> None:
            self._order += 1
            for (target, _), gradient in zip(node.next_functions, computed, strict=False):
                if target is not None and values_of(gradient):
                    first = self._arriving.get(node)
                    if first is None:
                        first = self._made_by(node, gradient, arrived)
                        if _is_of_a_weight(target, gradient):
                            first = replace(first, rows=())
                    self._arriving.setdefault(target, first)

        return ran

    def watch_weight(self, node: Any) -> Any:
        """Return a hook for a gradient that arrives at a weight; the hook frees the gradient."""

        def arrived(gradient: Tensor) -> Tensor | None:
            if self.found is None and (values := values_of(gradient)):
                name = self.trace.name_of_weight(node.variable)
                first = self._arriving.get(node)
                if first is None:
                    first = Origin(f"the gradient of `{name}`", values, self._order)
                self.found = replace(first, tensor=name)
            plain = type(gradient) is Tensor and gradient.layout is torch.strided
            return gradient.new_zeros(()).expand_as(gradient) if plain else None

        return arrived

    def _made_by(self, node: Node, gradient: Tensor, arrived: Sequence[Any]) -> Origin:
        """Name the node that has made the first gradient that is not finite."""
        call = self.trace.nodes.get(node, Call("", "", "", True))
        operation = call.operation or node.name()
        at = place_of(operation, call.module, call.place)
        size = self.trace.num_rows
        return Origin(
            text=f"the gradient that the backward of {at} computes",
            values=values_of(gradient),
            order=self._order,
            rows=rows_of(not_finite(gradient), size) if call.of_batch else (),
            num_rows=size,
            module=call.module,
            operation=operation,
            place=call.place,
            inputs=ranges_of([each for each in arrived if each is not None], None),
        )


def _is_of_a_weight(target: Node, gradient: Tensor) -> bool:
    """True for the gradient of a weight, or of a view, a transpose or a cast of one: none of its
    dimensions is that of the batch."""
    node: Any = target
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node is not None and bool(node.variable.numel() == gradient.numel())


def _reachable(last: Node) -> Iterator[Node]:
    seen, new = {last}, [last]
    while new:
        node = new.pop()
        yield node
        for each, _ in node.next_functions:
            if each is not None and each not in seen:
                seen.add(each)
                new.append(each)
