"""Tokens on disk, as `drivetrain data tokenize` writes them, read a window at a time.

A folder holds shards, `tokens-00000.bin` and so on, of plain integers (little-endian, 16 or 32
bits), and `tokens.json`, written last, which lists the shards with their lengths and checksums. All
shards together are one long sequence. Opening reads only the index; a shard is mapped into memory
when one of its windows is read.
"""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernel.errors import DataError
from .positions import LARGEST
from .small_files import open_regular, read_json

__all__ = ["DTYPES", "INDEX", "MAX_INDEX_BYTES", "Shard", "TokenShards", "read_index", "shard_name"]

INDEX = "tokens.json"
DTYPES = {"uint16": torch.uint16, "int32": torch.int32}
MAX_INDEX_BYTES = 64 << 20
_READ_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Shard:
    """The index's entry of one file."""

    tokens: int
    crc32: int


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"tokens-{number:05d}.bin"


class TokenShards:
    """The tokens of a folder in windows of `length`, as data that can be indexed: sample i is
    `{"input_ids": tokens i * length to (i + 1) * length}`. A rest that does not fill a window is
    left out.

    Raises `DataError` for a folder without such tokens, or with missing ones.
    """

    def __init__(self, folder: str | Path, length: int) -> None:
        self.folder, self.length = Path(folder), length
        if length < 1:
            raise DataError(f"length is {length}; a window must have at least 1 token")
        self.index = read_index(self.folder)
        self.dtype = DTYPES[self.index["dtype"]]
        self.shards = [Shard(**shard) for shard in self.index["shards"]]
        self._starts = list(accumulate((shard.tokens for shard in self.shards), initial=0))
        self.num_tokens = self._starts[-1]
        if self.num_tokens < length:
            raise DataError(
                f"{self.folder} holds {self.num_tokens} tokens, and a window takes {length}"
            )
        for number, shard in enumerate(self.shards):
            _check_size(self.folder / shard_name(number), shard.tokens * self.dtype.itemsize)
        self._maps: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return self.num_tokens // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)} in {self.folder}")
        return {"input_ids": self.tokens(index * self.length, self.length)}

    def tokens(self, start: int, count: int) -> Tensor:
        """Return `count` tokens from `start` in the whole sequence, as int64; fewer at its end."""
        parts = []
        stop = min(start + count, self.num_tokens)
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[number + 1])
            parts.append(self._read(number, start - self._starts[number], end - start))
            start = end
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def damaged(self) -> list[str]:
        """Describe the shards that are not as they were written; reads every token."""
        return [
            f"{self.folder / shard_name(number)}: its checksum is not that of {INDEX}"
            for number, shard in enumerate(self.shards)
            if self._checksum(number) != shard.crc32
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, which maps the files itself."""
        return {**self.__dict__, "_maps": {}}

    def _read(self, number: int, start: int, count: int) -> Tensor:
        size = self.dtype.itemsize
        raw = bytearray(self._map(number)[start * size : (start + count) * size])
        return torch.frombuffer(raw, dtype=self.dtype).to(torch.int64)

    def _map(self, number: int) -> mmap.mmap:
        if number not in self._maps:
            with open_regular(self.folder / shard_name(number)) as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[number]

    def _checksum(self, number: int) -> int:
        found = 0
        with open_regular(self.folder / shard_name(number)) as file:
            while block := file.read(_READ_AT_ONCE):
                found = zlib.crc32(block, found)
        return found


def read_index(folder: Path) -> dict[str, Any]:
    """Read `tokens.json`. Raises `DataError` if it is missing or invalid."""
    path = folder / INDEX
    try:
        found = read_json(path, MAX_INDEX_BYTES)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no {INDEX}, which `drivetrain data tokenize` writes when all tokens "
            "are there: run it, or run it again to continue"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    match found:
        case {"format": 1, "dtype": str(dtype), "shards": [*shards]} if dtype in DTYPES and all(
            map(_is_shard, shards)
        ):
            return dict(found)
    raise DataError(f"{path} is not an index of tokens that this version reads")


def _is_shard(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() == {"tokens", "crc32"}
        and type(value["tokens"]) is type(value["crc32"]) is int
        and 0 < value["tokens"] < LARGEST
    )


def _check_size(path: Path, expected: int) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror}") from error
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes, and {expected} were written: it was truncated or replaced; "
            "copy it again, or tokenize again"
        )
