"""Finds the first tensor of a forward that is not finite.

The origin of a value that is not finite follows the data: a result takes over the origin of its
inputs, and where these were finite, the operation itself is the origin. So a loss leads to its own
cause, and infinities that are not part of it, such as those of a mask before a softmax, do not
count.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from ..data.nested import named_leaves, tensors_of
from ..data.user_frames import user_line
from ..kernel.recipe import Batch
from .nonfinite_values import (
    INFINITE,
    NAN,
    Origin,
    name_of,
    not_finite,
    place_of,
    ranges_of,
    rows_of,
    rows_one_by_one,
    values_of,
    writes,
)

__all__ = ["Call", "Trace"]


class Call(NamedTuple):
    """A call of an operation."""

    operation: str
    module: str
    place: str
    of_batch: bool
    """True if its result depends on the batch, so that it may have rows."""


class Trace(TorchFunctionMode):
    """Watches one microbatch on one rank. Enter it around the loss.

    `names`: the FQN of each module. With `nodes`, the calls that have made the nodes of
    the graph are noted for the backward.
    """

    def __init__(self, names: Mapping[nn.Module, str], batch: Batch, nodes: bool) -> None:
        super().__init__()
        self.names = names
        self._leaves = list(named_leaves(batch))  # the loss may take some out of the batch
        self.num_rows = next((len(each) for each in tensors_of(batch) if each.dim()), 0)
        self.nodes: dict[Node, Call] = {}
        self._notes_nodes = nodes
        self._of_batch = {id(each): weakref.ref(each) for each in tensors_of(batch)}
        self._weights: dict[int, tuple[Tensor, str]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._newest: Origin | None = None
        """Taken for the origin of tensors that no operation has made: a function that torch does
        not show, such as the `apply` of an `autograd.Function`, has made them of others."""
        self._entered: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._count, self._looks = 0, False

    def __enter__(self) -> Trace:
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def of_loss(self, loss: Tensor) -> Origin | None:
        """Return the origin of a loss that is not finite; None for a finite one."""
        if not (values := values_of(loss)):
            return None
        return self._known(loss) or self._of_output("recipe.loss", values)

    # --- forward --------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._entered.append(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._entered.pop()
        self._looks = True  # this method's own operations are not looked at
        try:
            for each in tensors_of(output):
                self._mark_if_of_batch(each, args)
                if self._notes_nodes and each.grad_fn is not None:
                    # of functions that are no operations of torch
                    self._made(each.grad_fn, Call("", self._name(module), "", True))
                if self._known(each) is None and (values := values_of(each)):
                    found = self._of_inputs(args, values)
                    name = f"`{self._name(module) or type(module).__name__}`"
                    self._remember(each, found or self._of_output(name, values))
        finally:
            self._looks = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._looks or (name := getattr(function, "__name__", "")) in _LOOK_AWAY:
            return function(*args, **kwargs)
        self._count += 1
        written = args[:1] if writes(name) else ()
        before = [self._origin_of(each) for each in tensors_of(written)]
        result = function(*args, **kwargs)
        called, frame = [args, kwargs], sys._getframe(1)
        for each in tensors_of([result, written]):
            self._mark_if_of_batch(each, called)
            values = values_of(each)
            if not values:
                self._origins.pop(id(each), None)
            else:
                inputs = [args[1:], kwargs] if written else called
                first = next(filter(None, before), None) or self._of_inputs(inputs, values)
                first = first or self._here(function, inputs, each, frame)
                if not (first.rows or first.tensor) and self._is_of_batch(each):
                    first = replace(first, rows=rows_of(not_finite(each), self.num_rows))
                self._remember(each, first)
            if self._notes_nodes and each.grad_fn is not None:
                call = Call(
                    name_of(function), self._module(), user_line(frame), self._is_of_batch(each)
                )
                self._made(each.grad_fn, call)
        if self._notes_nodes:
            self._note_weights(called)
        return result

    def _remember(self, tensor: Tensor, origin: Origin) -> None:
        self._origins[id(tensor)] = weakref.ref(tensor), origin
        if not origin.meant:
            self._newest = origin

    def _is_of_batch(self, tensor: Tensor) -> bool:
        found = self._of_batch.get(id(tensor))
        return found is not None and found() is tensor

    def _mark_if_of_batch(self, tensor: Tensor, inputs: Any) -> None:
        """Note a result of the batch: only such a tensor has rows that are samples."""
        if any(map(self._is_of_batch, tensors_of(inputs))):
            self._of_batch[id(tensor)] = weakref.ref(tensor)
        elif not self._is_of_batch(tensor):
            self._of_batch.pop(id(tensor), None)

    def _known(self, tensor: Tensor) -> Origin | None:
        found = self._origins.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _origin_of(self, tensor: Tensor) -> Origin | None:
        """The origin of a tensor that no operation so far has made, too; None for a finite one."""
        if (known := self._known(tensor)) is not None:
            return known
        if not (values := values_of(tensor)):
            return None
        found = self._before_step(tensor, values)
        self._remember(tensor, found)
        return found

    def _of_inputs(self, inputs: Any, values: str) -> Origin | None:
        """Return the origin that a result with such `values` takes over; None if the operation
        itself is the origin."""
        tensors = list(tensors_of(inputs))
        if not tensors and values == NAN:
            return self._newest  # numbers of a tensor, probably
        found = [origin for each in tensors if (origin := self._origin_of(each))]
        if causes := [origin for origin in found if not origin.meant]:
            return min(causes, key=lambda origin: origin.order)
        made_worse = values == NAN and all(origin.values != NAN for origin in found)
        return None if made_worse or not found else found[0]

    def _here(self, function: Any, inputs: Any, result: Tensor, frame: FrameType) -> Origin:
        """The operation that has made `result` of finite inputs, or of infinities that are
        meant."""
        operation = name_of(function)
        bad = not_finite(result)
        values = values_of(result)
        numbers = [leaf for _, leaf in named_leaves(inputs) if isinstance(leaf, float)]
        tensors = list(tensors_of(inputs))
        meant = not tensors or (values == INFINITE and not all(map(math.isfinite, numbers)))
        rows: tuple[int, ...] = ()
        if self._is_of_batch(result):
            rows = rows_of(bad, self.num_rows) or rows_one_by_one(function, inputs, self.num_rows)
        module, place = self._module(), user_line(frame)
        return Origin(
            text=f"the output of {place_of(operation, module, place)}",
            values=values,
            order=self._count,
            rows=rows,
            num_rows=self.num_rows,
            module=module,
            operation=operation,
            place=place,
            inputs=ranges_of(tensors, bad),
            meant=meant,
        )

    def _before_step(self, tensor: Tensor, values: str) -> Origin:
        """Name a tensor that was not finite when the microbatch began."""
        name, kind = "", "tensor"
        rows: tuple[int, ...] = ()
        for path, leaf in self._leaves:
            if leaf is tensor:
                name, kind = "batch" + "".join(f"[{key!r}]" for key in path), "batch"
                rows = rows_of(not_finite(tensor), self.num_rows)
        if kind == "tensor":
            for what, named in (("weight", "parameters"), ("buffer", "buffers")):
                for part, prefix in self.names.items():
                    for own, each in getattr(part, f"named_{named}")(recurse=False):
                        if each is tensor:
                            name, kind = ".".join(filter(None, (prefix, own))), what
        if kind == "tensor" and self._newest is not None:
            return self._newest
        meant = kind in ("buffer", "tensor") and values == INFINITE
        said = {
            "batch": name,
            "tensor": f"a tensor that no operation of torch has made, used in {self._inside()},",
        }.get(kind, f"the {kind} `{name}`, as it was before the step,")
        return Origin(
            said, values, self._count, rows, self.num_rows, self._module(), "", name, meant=meant
        )

    def _of_output(self, name: str, values: str) -> Origin:
        return Origin(f"the output of {name}", values, self._count, module=self._module())

    def _module(self) -> str:
        last = self._entered[-1] if self._entered else None
        return "" if last is None else self._name(last) or type(last).__name__

    def _name(self, module: nn.Module) -> str:
        return self.names.get(module, "")

    def _inside(self) -> str:
        return f"`{name}`" if (name := self._module()) else "recipe.loss or the model itself"

    def _made(self, last: Node, call: Call) -> None:
        """Note which call has made the nodes up to `last` that are not noted yet."""
        new = [last]
        while new:
            node = new.pop()
            if node not in self.nodes and not hasattr(node, "variable"):
                own = isinstance(node, BackwardCFunction)  # an autograd.Function
                self.nodes[node] = call._replace(operation="", place="") if own else call
                new += [each for each, _ in node.next_functions if each is not None]

    def name_of_weight(self, weight: Tensor) -> str:
        """Return the FQN of a weight that the forward has used."""
        return self._weights.get(id(weight), (weight, ""))[1]

    def _note_weights(self, inputs: Any) -> None:
        """Note the names of weights, which some drivers replace during a forward."""
        for each in tensors_of(inputs):
            if each.is_leaf and each.requires_grad and id(each) not in self._weights:
                owners = [*self._entered[-1:], *self.names]
                found = (
                    ".".join(filter(None, (self._name(owner), own)))
                    for owner in owners
                    for own, weight in owner.named_parameters(recurse=False)
                    if weight is each
                )
                # fsdp gathers into a weight before it gives the weight to its module
                if name := next(found, ""):
                    self._weights[id(each)] = each, name


_LOOK_AWAY = frozenset({"__set__", "backward", "register_hook"})
"""Calls that compute nothing that a loss could be made of."""
