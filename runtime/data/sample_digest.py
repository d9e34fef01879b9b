"""Digests of samples: to check that readers of one stream got the same samples, and to record which
samples a step had."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .nested import named_leaves

__all__ = ["NUM_PARTS", "differing_parts", "digest_of", "part_digests", "part_text"]


def digest_of(samples: Iterable[Any]) -> int:
    """Return a number from 1 to 2**20 - 1. Exact values in samples (text, bytes, whole numbers)
    count. Other values count only if there are no exact ones, since each rank may augment by its
    own random numbers. Objects that are neither count by their type."""
    leaves = [(path, leaf) for sample in samples for path, leaf in named_leaves(sample)]
    exact = [(path, leaf) for path, leaf in leaves if _is_exact(leaf)]
    found = hashlib.sha256()
    for path, leaf in exact or leaves:
        found.update(repr(path).encode())
        found.update(_bytes_of(leaf))
    return int.from_bytes(found.digest()[:8], "big") % ((1 << 20) - 1) + 1


def _is_exact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if isinstance(leaf, Tensor):
        return not leaf.is_floating_point() and not leaf.is_complex()
    if dtype is not None:  # NumPy's
        return getattr(dtype, "kind", "") in "biuSU"
    return isinstance(leaf, (str, bytes, int))


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if hasattr(leaf, "dtype") and hasattr(leaf, "tobytes"):
        raw: bytes = leaf.tobytes()
        return raw
    if isinstance(leaf, (str, bytes, int, float)):
        return repr(leaf).encode()
    return type(leaf).__qualname__.encode()


NUM_PARTS = 64
"""Most parts of a global batch that have a digest of their own."""
_PART_BITS = 20
_MOST_WORDS = 1 << 16
"""Words of a sample's tensor that count. Of a larger one every second word does, or every third."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def num_parts(num_samples: int) -> int:
    """Return the number of parts of a global batch that have a digest of their own."""
    return min(NUM_PARTS, num_samples)


def part_digests(
    batch: Any, num_samples: int, start: int, of_all: int, repeats: int = 1
) -> list[int]:
    """Return a number below 2**20 for each part of a global batch of `of_all` samples, from one
    microbatch: samples `start` to `start + num_samples` of it. Numbers of all microbatches are
    added, modulo 2**20, so that their order and size do not count, but for padding. Where the
    tensors of a batch are not one row a sample, its first part has the digest of all. Tensors on a
    device are left out, since reading them would wait; so are sparse ones, and other values beside
    tensors.
    `repeats`: rounds of the samples in the batch.
    """
    parts = num_parts(of_all)
    found = [(path, leaf) for path, leaf in named_leaves(batch) if _can_be_read(leaf)]
    tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor)]
    if not tensors or any(not t.dim() or len(t) != num_samples * repeats for _, t in tensors):
        return [_digest_of_all(found) % (1 << _PART_BITS), *[0] * (parts - 1)]
    total = torch.zeros(num_samples, dtype=torch.int64)
    for path, tensor in tensors:
        total += _mixed(_row_sums(tensor[:num_samples]) + _digest_of_all([(path, 0)]))
    total = _mixed(total) & ((1 << _PART_BITS) - 1)
    place = (torch.arange(start, start + num_samples) * parts // max(1, of_all)).clamp_(
        0, parts - 1
    )
    sums: list[int] = torch.zeros(parts, dtype=torch.int64).index_add_(0, place, total).tolist()
    return sums


def part_text(sums: Iterable[int]) -> str:
    """Return the digests of the parts, added up over microbatches, as five digits each."""
    return "".join(f"{each % (1 << _PART_BITS):05x}" for each in sums)


def differing_parts(first: str, second: str) -> list[int]:
    """Return the indices of the parts in which two texts of `part_text` differ."""
    return [
        at // 5
        for at in range(0, max(len(first), len(second)), 5)
        if first[at : at + 5] != second[at : at + 5]
    ]


def _can_be_read(leaf: Any) -> bool:
    """Return False for a tensor on a device, and for one that is not dense."""
    if not isinstance(leaf, Tensor):
        return True
    return leaf.device.type == "cpu" and leaf.layout == torch.strided


def _digest_of_all(leaves: Iterable[tuple[Any, Any]]) -> int:
    found = hashlib.blake2b(digest_size=7)
    for path, leaf in leaves:
        found.update(repr(path).encode())
        found.update(_bytes_of(leaf))
    return int.from_bytes(found.digest(), "big")


def _row_sums(rows: Tensor) -> Tensor:
    """Return for each row the sum of its words, each times an odd number of its place."""
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    flat = rows.detach().contiguous().reshape(len(rows), -1)
    raw = (
        flat.view(torch.uint8)
        if flat.numel()
        else flat.new_zeros((len(rows), 1), dtype=torch.uint8)
    )
    size = next(size for size in _WORDS if raw.shape[1] % size == 0)
    words = raw.view(_WORDS[size])
    words = words[:, :: -(-words.shape[1] // _MOST_WORDS)]
    return (words * _factors(words.shape[1])).sum(1)


@lru_cache(maxsize=16)
def _factors(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def _mixed(values: Tensor) -> Tensor:
    """Spread each bit over all bits, modulo 2**64."""
    values = (values ^ (values >> 32)) * 0x4CF5AD432745937F
    return (values ^ (values >> 29)) * 0x2545F4914F6CDD1D
