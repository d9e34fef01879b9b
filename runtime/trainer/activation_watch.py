"""Counts the memory that autograd keeps for the backward, by the module that computes with it."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["OUTSIDE", "ActivationWatch", "storage_of_tensor"]

OUTSIDE = "outside of modules"
"""Name of what no module computes, such as the loss."""


class ActivationWatch:
    """Counts saved tensors from `resume` to `pause`, and notes the most that was ever kept.

    Weights, and tensors that are computed from one weight alone, such as its cast, are not counted.
    A storage that several operations save counts once, for the module that saves it first.
    `module`: the user's own, whose names are used.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, str] = {id(part): n for n, part in module.named_modules()}
        self._names[id(module)] = type(module).__name__
        self._parts_of_model = [*module.modules()]  # so that no address is used again
        self._weights = {storage_of_tensor(p)[0] for p in module.parameters()}
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._thread = threading.get_ident()
        self._entered: ExitStack | None = None
        self._kept: dict[Any, _Storage] = {}
        self._bytes, self._by_module = 0, defaultdict[str, int](int)
        self._peak_bytes, self._peak = 0, dict[str, int]()

    def resume(self) -> None:
        """Count what this thread saves from now on."""
        if self._entered is None:
            self._entered = ExitStack()
            self._entered.enter_context(self._hooks)
            graph: Any = torch.autograd.graph
            disable = graph.disable_saved_tensors_hooks
            graph.disable_saved_tensors_hooks = lambda error_message: self._without_hooks(
                disable(error_message)
            )
            self._entered.callback(setattr, graph, "disable_saved_tensors_hooks", disable)

    def pause(self) -> None:
        """Count no more. What was counted is still followed until it is freed."""
        if self._entered is not None:
            self._entered.close()
            self._entered = None

    def peak(self) -> Mapping[str, int]:
        """Return the bytes by module when most were kept."""
        self._note_peak()
        return self._peak

    @contextmanager
    def _without_hooks(self, disabled: AbstractContextManager[Any]) -> Iterator[None]:
        """Leave the hooks in functions that refuse them: `torch.func` and `torch.vmap`."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            with disabled:
                yield
            return
        self._hooks.__exit__()
        try:
            with disabled:
                yield
        finally:
            self._hooks.__enter__()

    def _pack(self, tensor: Tensor) -> _Saved:
        # an output that is saved by its own operation would keep itself alive
        kept = tensor if tensor.is_leaf else tensor.detach()
        key, num_bytes = storage_of_tensor(kept)
        if not num_bytes or key in self._weights or _is_of_a_weight(tensor):
            return _Saved(kept)
        storage = self._kept.get(key)
        if storage is None:
            storage = self._kept[key] = _Storage(self._module_of_caller(), num_bytes)
            self._bytes += num_bytes
            self._by_module[storage.module] += num_bytes
        storage.num_saved += 1
        return _Saved(kept, self, key)

    def release(self, key: Any) -> None:
        """Count the end of one saved tensor. Autograd calls this, in any thread."""
        storage = self._kept[key]
        storage.num_saved -= 1
        if not storage.num_saved:
            self._note_peak()
            del self._kept[key]
            self._bytes -= storage.num_bytes
            self._by_module[storage.module] -= storage.num_bytes

    def _note_peak(self) -> None:
        if self._bytes > self._peak_bytes:
            self._peak_bytes = self._bytes
            self._peak = {name: size for name, size in self._by_module.items() if size}

    def _module_of_caller(self) -> str:
        """Return the name of the innermost module whose method is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = self._names.get(id(_self_of(frame)))
            if name is not None:
                return name
            frame = frame.f_back
        return OUTSIDE


class _Storage:
    """Memory that is kept: for which module, and by how many saved tensors."""

    __slots__ = ("module", "num_bytes", "num_saved")

    def __init__(self, module: str, num_bytes: int) -> None:
        self.module, self.num_bytes, self.num_saved = module, num_bytes, 0


class _Saved:
    """A tensor that autograd keeps. `watch` is called when autograd frees it."""

    __slots__ = ("_key", "_tensor", "_version", "_watch")

    def __init__(self, tensor: Tensor, watch: ActivationWatch | None = None, key: Any = None):
        self._tensor, self._version = tensor, tensor._version
        self._watch, self._key = watch, key

    def tensor(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was changed in place, as autograd does
        without hooks."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self._tensor.type()} {list(self._tensor.shape)}] is at "
                f"version {self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.release(self._key)


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor()


def storage_of_tensor(tensor: Tensor) -> tuple[Any, int]:
    """Return a key of the storage that holds a tensor's elements on this rank, and its bytes."""
    local: Any = getattr(tensor, "to_local", None)
    if local is not None:  # a DTensor
        tensor = local()
    try:
        storage = tensor.untyped_storage()
        if address := storage.data_ptr():
            return (tensor.device, address), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of lazy devices
        pass
    return id(tensor), tensor.numel() * tensor.element_size()


def _is_of_a_weight(tensor: Tensor) -> bool:
    """Return True for a parameter, and for a tensor of as many elements that is computed from a
    parameter alone: a view, a transpose or a cast."""
    if isinstance(tensor, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None:
        weight = getattr(node, "variable", None)
        if weight is not None:
            return isinstance(weight, nn.Parameter) and weight.numel() == tensor.numel()
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False


def _self_of(frame: FrameType) -> Any:
    """Return the first argument of a method that is running, if it is called self."""
    code = frame.f_code
    if code.co_varnames[:1] != ("self",) or not code.co_flags & inspect.CO_OPTIMIZED:
        return None
    found = frame.f_locals
    owner = found.get("self")
    if type(found) is dict:  # before Python 3.13 a copy, which would keep the locals alive
        found.clear()
    return owner
