"""A simulated accelerator, to prove drivers of devices on a machine that has none.

`register` adds the device type `sim` to this process: torch then has an accelerator whose tensors
lie in host memory of their own, and whose operations are those of the CPU, called from Python. Its
tensors keep strides, views and storages as a real device's do, and host code that reads them
without a copy fails as it would there. It has no streams, no events and no page-locked memory.

`SimulatedDevice.replaced` lets the device misbehave. The module uses torch's experimental way to
register a device in Python, which torch 2.15 has; nothing but tests depends on it.
https://docs.pytorch.org/docs/stable/accelerator/index.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..data.nested import map_leaves
from ..data.private_names import private_name

__all__ = ["DEVICE", "device", "register"]

DEVICE = "sim"


class SimulatedDevice:
    """The module `torch.sim`: what torch asks a device for."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.has_float64 = True
        self.most_bytes: int | None = None
        """Size of the largest tensor for which there is memory. None: there is always some."""
        self.replaced: dict[str, Callable[..., Any]] = {}
        """By name of an operation of the CPU (`aten::mm`): what is called in its place, with the
        operation and its arguments, on the host's tensors over the device's memory."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def set_device(self, index: Any) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Let the CPU's operations draw the device's random numbers."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def autocast_dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype(DEVICE)

    def synchronize(self, device: Any = None) -> None:
        pass


device = SimulatedDevice()


# --- memory: a tensor of the device and one of the host may share it, by DLPack -------------------
# https://dmlc.github.io/dlpack/latest/c_api.html


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p)
"""Frees a tensor's memory. A function in Python would disturb an exception that is on its way."""
_CPU, _EXTENSION = 1, 12
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_DTYPES = {
    torch.bool: (_BOOL, 8),
    torch.uint8: (_UINT, 8),
    torch.int8: (_INT, 8),
    torch.int16: (_INT, 16),
    torch.int32: (_INT, 32),
    torch.int64: (_INT, 64),
    torch.float16: (_FLOAT, 16),
    torch.bfloat16: (_BFLOAT, 16),
    torch.float32: (_FLOAT, 32),
    torch.float64: (_FLOAT, 64),
    torch.complex64: (_COMPLEX, 64),
    torch.complex128: (_COMPLEX, 128),
}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _new(kind: int, like: Tensor, pointer: int = 0) -> Tensor:
    """Return a tensor with the shape, strides and dtype of `like`, over the memory at `pointer`; 0:
    memory of its own."""
    if kind == _EXTENSION:
        _check(like)
    head = ctypes.sizeof(_Managed) + 16 * like.dim()
    last = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    block = _libc.malloc(head + (0 if pointer or not like.numel() else (last + 1) * like.itemsize))
    numbers = (ctypes.c_int64 * (2 * like.dim())).from_address(block + ctypes.sizeof(_Managed))
    numbers[:] = [*like.shape, *like.stride()]
    where = ctypes.addressof(numbers)
    shape, strides = (
        ctypes.cast(at, ctypes.POINTER(ctypes.c_int64)) for at in (where, where + 8 * like.dim())
    )
    dtype = _DataType(*_DTYPES[like.dtype], 1)
    managed = _Managed.from_address(block)
    managed.tensor = _Tensor(
        pointer or block + head, _Device(kind, 0), like.dim(), dtype, shape, strides, 0
    )
    managed.context, managed.deleter = None, _FREE
    made: Tensor = from_dlpack(_new_capsule(block, b"dltensor", None))
    return made


def _check(like: Tensor) -> None:
    """Refuse a tensor that the device cannot hold."""
    if like.dtype == torch.float64 and not device.has_float64:
        raise TypeError("the simulated device has no float64")
    if device.most_bytes is not None and like.nbytes > device.most_bytes:
        raise torch.OutOfMemoryError(f"the simulated device has no memory for {like.nbytes} bytes")


def to_device(host: Tensor) -> Tensor:
    """Return a copy on the device, with the same strides."""
    made = _new(_EXTENSION, host)
    on_host(made).copy_(host)
    return made


def on_host(tensor: Tensor) -> Tensor:
    """Return a host tensor over this device tensor's memory, which must outlive it."""
    return _new(_CPU, tensor, tensor.data_ptr())


def is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE


# --- operations: the CPU's, on the same memory ----------------------------------------------------


def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operation of the CPU on tensors of the device."""
    if _is_view(operation):
        raise NotImplementedError(f"{operation.name()}: the simulated device has no such view")
    inputs: dict[int, Tensor] = {}

    def taken(value: Any) -> Any:
        if is_on_device(value):
            host = on_host(value)
            inputs[id(host)] = value
            return host
        of_device = isinstance(value, torch.device) and value.type == DEVICE
        return torch.device("cpu") if of_device else value

    def returned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return inputs[id(value)] if id(value) in inputs else to_device(value)

    args, kwargs = map_leaves(taken, (args, kwargs))
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    with device.draws() if draws else nullcontext():
        if (replaced := device.replaced.get(operation.name())) is not None:
            made = replaced(operation, *args, **kwargs)
        else:
            made = operation(*args, **kwargs)
    return map_leaves(returned, made)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    there = on_host(target) if is_on_device(target) else target
    here = on_host(source) if is_on_device(source) else source
    if (replaced := device.replaced.get("aten::_copy_from")) is not None:
        replaced(there.copy_, here, source.device.type, target.device.type)
    else:
        there.copy_(here)
    return target


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    memory_format = memory_format or torch.contiguous_format
    like = torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")
    return _new(_EXTENSION, like)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return _new(_EXTENSION, torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def _as_strided(tensor: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    """Return a view, which shares the storage."""
    view: Tensor = torch.ops.aten.alias(tensor)
    begin = tensor.storage_offset() if offset is None else offset
    torch.ops.aten.as_strided_(view, size, stride, begin)
    return view


def _view(tensor: Tensor, size: Any) -> Tensor:
    host = on_host(tensor).view(size)
    return _as_strided(tensor, host.shape, host.stride())


def _reshape_alias(tensor: Tensor, size: Any, stride: Any) -> Tensor:
    return _as_strided(tensor, size, stride)


def _item(tensor: Tensor) -> Any:
    return on_host(tensor).item()


_OWN: dict[str, Callable[..., Any]] = {
    "_copy_from": _copy_from,
    "_local_scalar_dense": _item,
    "_reshape_alias": _reshape_alias,
    "as_strided": _as_strided,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "view": _view,
}
_CAST = ("addmm", "baddbmm", "bmm", "conv1d", "conv2d", "linear", "matmul", "mm")
"""Operations that autocast computes in 16 bits."""
_TORCHS = {"_to_copy", "as_strided_", "copy_", "to_dense"}
"""Operations that torch builds from others, or that change no memory. So does each view."""


def _cast(operation: Any) -> Callable[..., Any]:
    """Return an operation that casts the floating-point tensors that it is given."""
    keys: Any = torch._C.DispatchKey
    key = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        floats = is_on_device(value) and value.is_floating_point()
        return value.to(device.autocast_dtype()) if floats else value

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*map_leaves(cast, args), **map_leaves(cast, kwargs))

    return called


@cache
def register() -> tuple[Any, ...]:
    """Add the device to this process; return the libraries that hold its operations."""
    module, name = "torch.utils.backend_registration", "_setup_privateuseone_for_python_backend"
    set_up = private_name(module, name, purpose="the simulated device")
    set_up(DEVICE, backend_module=device)
    library: Any = torch.library.Library
    rest, aten = library("_", "IMPL"), library("aten", "IMPL")
    rest.fallback(call, "PrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, own in _OWN.items():
        aten.impl(name, own, "PrivateUse1")
    for name in _CAST:
        aten.impl(name, _cast(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        _register_explicit(aten, name)
    return rest, aten


def _register_explicit(aten: Any, full_name: str) -> None:
    """Register an operation for which torch would not ask the fallback: those with a kernel for all
    devices."""
    space, _, name = full_name.partition("::")
    base, _, overload = name.partition(".")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for_all = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    if space != "aten" or name in _OWN or base in _TORCHS:
        return
    if not any(has(full_name, key) for key in for_all):
        return
    operation = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    if operation is None or _is_view(operation):
        return
    if any("Tensor" in str(argument.type) for argument in operation._schema.arguments):
        aten.impl(name, lambda *args, **kwargs: call(operation, *args, **kwargs), "PrivateUse1")


def _is_view(operation: Any) -> bool:
    aliases = [made.alias_info for made in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
