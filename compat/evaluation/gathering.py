"""What is gathered from all processes, whatever it is made of."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...kernel.contract import Session
from ..trainer.tree import map_tensors

__all__ = ["exchange_objects", "gather_tensors", "has_only_tensors", "pad_to_the_longest"]


def has_only_tensors(data: Any) -> bool:
    """Whether mappings, lists and tuples hold tensors and nothing else."""
    if isinstance(data, Tensor):
        return True
    if isinstance(data, Mapping):
        return all(map(has_only_tensors, data.values()))
    return isinstance(data, list | tuple) and all(map(has_only_tensors, data))


def gather_tensors(session: Session, data: Any) -> Any:
    """The same structure, each tensor with those of all ranks behind each other, on its device."""

    def gather(tensor: Tensor) -> Tensor:
        whole = tensor if tensor.dim() else tensor[None]
        return session.gather(whole.detach().contiguous()).to(tensor.device)

    return map_tensors(gather, data)


def pad_to_the_longest(session: Session, data: Any, dim: int, fill: int, in_front: bool) -> Any:
    """The same structure, each tensor as long in `dim` as the longest of all ranks.

    Tensors without that dimension are left alone.
    """

    def pad(tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        missing = max(session.exchange(tensor.shape[dim])) - tensor.shape[dim]
        later = tensor.dim() - 1 - dim % tensor.dim()  # dimensions behind it come first in `pad`
        widths = [0, 0] * later + ([missing, 0] if in_front else [0, missing])
        return functional.pad(tensor, widths, value=fill) if missing else tensor

    return map_tensors(pad, data)


def exchange_objects(session: Session, data: Any) -> Any:
    """Everyone's lists, one after the other; what is no list becomes an item of one.

    Items are plain values, tensors, arrays, and lists, tuples and dicts of them. Raises TypeError
    for anything else: nothing is pickled.
    """
    found = [_unpacked(packed) for packed in session.exchange(_packed(data))]
    return [item for part in found for item in (part if isinstance(part, list) else [part])]


def _packed(value: Any) -> Any:
    """A value in JSON types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).partition(".")[2]
        return {"tensor": base64.b64encode(bits).decode(), "of": dtype, "shape": [*value.shape]}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": _packed(torch.as_tensor(value))}
    if isinstance(value, Mapping):
        return {"items": [[_packed(key), _packed(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_packed(inner) for inner in value]}
    if isinstance(value, list):
        return [_packed(inner) for inner in value]
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to other processes: give numbers, texts, "
        "tensors, arrays, or lists, tuples and dicts of them"
    )


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["of"])
        bits = bytearray(base64.b64decode(value["tensor"]))
        flat = torch.frombuffer(bits, dtype=dtype) if bits else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    if "array" in value:
        return _unpacked(value["array"]).numpy()
    if "tuple" in value:
        return tuple(_unpacked(inner) for inner in value["tuple"])
    return {_unpacked(key): _unpacked(inner) for key, inner in value["items"]}
