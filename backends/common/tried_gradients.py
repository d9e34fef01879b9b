"""Try a function on made-up gradients: is it linear, and does it change each sample by itself?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Like", "acts_by_rows", "is_linear"]

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A function of gradients; it may change them in place."""

_SCALES = (1e-4, 1.0, 1e4)
"""Sizes of the gradients that a function is tried on: a clamp shows at one of them."""


class Like(NamedTuple):
    """The properties of a gradient to make up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placed: Any = None
    """Mesh and placements of a `DTensor`, of which `shape` is the part of this rank."""

    @classmethod
    def of(cls, gradient: Tensor) -> Like:
        """Return the properties of a gradient."""
        placed = None
        if isinstance(gradient, DTensor):
            placed = gradient.device_mesh, gradient.placements
        local = _local(gradient)
        return cls(tuple(local.shape), local.dtype, local.device, placed)


def is_linear(change: Change, likes: Sequence[Like]) -> bool:
    """Return True if what `change` returns of a sum is the sum of what it returns."""
    with _random_state_kept(likes):
        draw = torch.Generator().manual_seed(0)
        first, second = _drawn(likes, draw), _drawn(likes, draw)
        expected = _called(change, first, likes)
        for scale in _SCALES:
            scaled = _called(change, [each * scale for each in first], likes)
            if not _near(scaled, [each * scale for each in expected], likes):
                return False
        both = _called(change, [a + b for a, b in zip(first, second, strict=True)], likes)
        others = _called(change, second, likes)
        return _near(both, [a + b for a, b in zip(expected, others, strict=True)], likes)


def acts_by_rows(change: Change, likes: Sequence[Like]) -> bool:
    """Return True if each row of what `change` returns depends on this row of the gradients alone.
    The gradients have as many rows (dimension 0) as each other, and more than one."""
    half = likes[0].shape[0] // 2
    parts = slice(None, half), slice(half, None)
    with _random_state_kept(likes):
        first = _drawn(likes, torch.Generator().manual_seed(0))
        for scale in _SCALES:
            whole = [each * scale for each in first]
            expected = _called(change, whole, likes)
            for kept, left_out in (parts, parts[::-1]):
                part = [each.clone() for each in whole]
                for each in part:
                    each[left_out] = 0
                made = _called(change, part, likes)
                if not _near([e[kept] for e in made], [e[kept] for e in expected], likes):
                    return False
    return True


@contextmanager
def _random_state_kept(likes: Sequence[Like]) -> Iterator[None]:
    devices = {each.device for each in likes if each.device.type not in ("cpu", "xla")}
    kind = next((each.type for each in devices), "cuda")
    with torch.no_grad(), torch.random.fork_rng([*devices], device_type=kind):
        yield


def _drawn(likes: Sequence[Like], generator: torch.Generator) -> list[Tensor]:
    """Draw plain gradients, each its rank's part, equal on all ranks."""
    return [
        torch.randn(like.shape, generator=generator).to(like.device, like.dtype) for like in likes
    ]


def _called(change: Change, plain: Sequence[Tensor], likes: Sequence[Like]) -> list[Tensor]:
    """Call `change` with copies of these gradients; return plain tensors on the host, float64."""
    given = []
    for each, like in zip(plain, likes, strict=True):
        copy = each.clone()
        given.append(copy if like.placed is None else DTensor.from_local(copy, *like.placed))
    return [_local(each).detach().cpu().double() for each in change(given)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _near(found: Sequence[Tensor], expected: Sequence[Tensor], likes: Sequence[Like]) -> bool:
    wide = all(like.dtype in (torch.float32, torch.float64) for like in likes)
    tolerance = 1e-4 if wide else 3e-2
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
        for a, b in zip(found, expected, strict=True)
        if b.numel()
    )
