"""Values of tensors that are not finite, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.nested import tensors_of

__all__ = [
    "INFINITE",
    "NAN",
    "Origin",
    "name_of",
    "not_finite",
    "place_of",
    "ranges_of",
    "rows_of",
    "rows_one_by_one",
    "values_of",
    "writes",
]

_FINITE, INFINITE, NAN = "", "infinity", "NaN"
_MOST_INPUTS = 3


@dataclass(frozen=True)
class Origin:
    """The first tensor that is not finite."""

    text: str
    """A clause that names the tensor, its operation and the line of the user's code."""
    values: str
    """`NaN` or `infinity`."""
    order: int
    """Number of the operation in its microbatch."""
    rows: tuple[int, ...] = ()
    """Places along the dimension of the batch that are not finite; empty if unknown."""
    num_rows: int = 0
    """Size of the batch along this dimension."""
    module: str = ""
    """FQN of the module, or the class of the whole model; empty outside of modules."""
    operation: str = ""
    tensor: str = ""
    """Name of a weight, a buffer or a part of the batch that was not finite before the step; of
    the weight whose gradient is not finite."""
    place: str = ""
    """Line of the user's code: `model.py:41`."""
    inputs: str = ""
    """The values that the operation was given where its result is not finite."""
    meant: bool = False
    """True for infinities that the code itself sets, as masks do."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for the other ranks."""
        return {**asdict(self), "rows": list(self.rows)}


def rows_of(bad: Tensor, size: int) -> tuple[int, ...]:
    """Return the places along the dimension of the batch where `bad` is true; empty if `bad`
    has no such dimension."""
    if not size or not bad.dim() or not bad.numel():
        return ()
    if size in bad.shape:
        by_row = bad.movedim(bad.shape.index(size), 0).reshape(size, -1)
    elif bad.shape[0] % size == 0:
        by_row = bad.reshape(size, -1)
    else:
        return ()
    return tuple(by_row.any(1).nonzero().flatten().tolist())


def rows_one_by_one(function: Any, inputs: Any, size: int) -> tuple[int, ...]:
    """Run an operation whose result has no dimension of the batch, such as a loss, on each
    sample alone. Return the samples for which the result is not finite."""
    args, kwargs = inputs
    tensors = list(tensors_of(inputs))
    if writes(getattr(function, "__name__", "")) or not all(
        type(each) in (Tensor, nn.Parameter) for each in tensors
    ):
        return ()
    if not size or not any(each.dim() and len(each) == size for each in tensors):
        return ()

    def of_row(value: Any, row: int) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
        return value[row : row + 1].detach() if whole else value

    try:
        results = [
            function(
                *(of_row(each, row) for each in args),
                **{key: of_row(each, row) for key, each in kwargs.items()},
            )
            for row in range(size)
        ]
    except Exception:  # not of samples: a reduction over the batch, say
        return ()
    return tuple(row for row, made in enumerate(results) if any(map(values_of, tensors_of(made))))


_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
_KEEP = {"requires_grad_", "detach_", "share_memory_", "retain_grad_"}


_PACKAGES = ("fft", "linalg", "special")


def name_of(function: Any) -> str:
    """Return the name that the user calls a function of torch by."""
    name, owner = getattr(function, "__name__", ""), str(getattr(function, "__module__", ""))
    if name == "__get__":  # an attribute, such as Tensor.T
        return f"torch.Tensor.{getattr(function.__self__, '__name__', '')}"
    if hasattr(function, "__objclass__") or name.startswith("__"):
        return f"torch.Tensor.{name}"
    if not name or owner.endswith("ops"):
        return str(function)
    if owner.endswith(("nn", "nn.functional")):
        return f"torch.nn.functional.{name}"
    package, _, rest = name.partition("_")
    return f"torch.{package}.{rest}" if package in _PACKAGES else f"torch.{name}"


def writes(name: str) -> bool:
    """True for the name of a function that writes to its first argument."""
    return name in _IN_PLACE or (
        name.endswith("_") and not name.endswith("__") and name not in _KEEP
    )


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's elements."""
    tensor = tensor.detach()
    shard = getattr(tensor, "to_local", None)
    return shard() if shard is not None else tensor


def not_finite(tensor: Tensor) -> Tensor:
    """Return which elements of this rank are NaN or infinite."""
    local = _local(tensor)
    return ~torch.isfinite(local.float() if local.element_size() == 1 else local)


def _has_nan(tensor: Tensor) -> bool:
    local = _local(tensor)
    return bool(torch.isnan(local.float() if local.element_size() == 1 else local).any())


def values_of(tensor: Any) -> str:
    """Return which values that are not finite a tensor has; empty for a finite one, and for one
    whose elements cannot be read, such as those of `torch.func`."""
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return _FINITE
    try:
        if tensor.is_meta or not bool(not_finite(tensor).any()):
            return _FINITE
        return NAN if _has_nan(tensor) else INFINITE
    except (NotImplementedError, RuntimeError):
        return _FINITE


def ranges_of(tensors: Sequence[Tensor], bad: Tensor | None) -> str:
    """Describe the values of finite tensors, where `bad` is true if the shape allows."""
    found = []
    for each in tensors:
        local = _local(each)
        if not each.is_floating_point():
            continue
        if bad is not None:
            with suppress(RuntimeError):  # another shape: the range of all
                local = local.expand(bad.shape)[bad]
        finite = local[torch.isfinite(local)].float()
        if finite.numel():
            low, high = f"{finite.min():.4g}", f"{finite.max():.4g}"
            found.append(low if low == high else f"{low} to {high}")
    return " and ".join(found[:_MOST_INPUTS])


def place_of(operation: str, module: str, place: str) -> str:
    """Say where an operation is: torch.log in `blocks.3` (model.py:41)."""
    inside = f" in `{module}`" if module else ""
    return f"{operation}{inside}{place and f' ({place})'}"
