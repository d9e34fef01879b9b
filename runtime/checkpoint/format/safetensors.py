"""Reads and writes the safetensors format, one tensor in memory at a time. Whole files that others
wrote are read by the safetensors package.

A file is 8 bytes of header length (little-endian), a JSON header padded with spaces to 8 bytes,
and the tensors' bytes, row after row, with neither gaps nor overlaps
(https://github.com/huggingface/safetensors). The reader believes nothing it has not checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32, crc32_combine  # ten times as fast as zlib's, or more

from ...kernel.errors import CheckpointDamaged
from ...kernel.paths import Place
from ..buffers import host_bytes, memory, num_bytes
from ..storage.protocol import OpenFile, storage_of
from ..storage.readers import read_in_parts
from . import strict_json

__all__ = [
    "DTYPES",
    "RESERVED",
    "Entry",
    "Source",
    "TensorFile",
    "checksum",
    "is_shape",
    "read_whole",
    "write",
]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
RESERVED = "__metadata__"
"""The one key of a header that is not a tensor; its values are strings."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 4 << 20
_PART_BYTES = 64 << 20
"""What one reads before it takes the next: the last ones end at about the same time."""
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 64


# --- writing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A tensor to be written. `load` is called when it is written, and again where the file has to
    be begun anew."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """Of a tensor that is in memory, or mapped into it."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write(
    path: Place, sources: Mapping[str, Source], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Write a new file and sync it; returns its size in bytes and its CRC-32.

    Raises `TypeError` for a dtype the format lacks, `ValueError` for a tensor that is not as
    announced, `OSError` with the file's name.
    """
    size = crc = 0

    def chunks() -> Iterator[memoryview]:
        nonlocal size, crc
        size = crc = 0
        for chunk in _chunks(sources, metadata):
            size += len(chunk)
            if len(chunk) < _CHUNK_BYTES:
                crc = crc32(chunk, crc)
                yield chunk
            else:  # added up while it is written: neither holds the interpreter
                summed = beside.submit(crc32, chunk, crc)
                yield chunk
                crc = summed.result()

    with ThreadPoolExecutor(1, "checksum") as beside:  # a thread only where one is needed
        storage_of(path).create(path, chunks)
    return size, crc


def checksum(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> tuple[int, int]:
    """The size in bytes and the CRC-32 of the file that `write` would write of these."""
    size = crc = 0
    for chunk in _chunks(sources, metadata):
        size, crc = size + len(chunk), crc32(chunk, crc)
    return size, crc


def _chunks(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of the file."""
    # Widest dtype first, as the reference writer has it: every tensor is aligned to its items.
    names = sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))
    for block in _blocks(names, sources, metadata):
        for start in range(0, len(block), _CHUNK_BYTES):
            yield block[start : start + _CHUNK_BYTES]


def _blocks(
    names: list[str], sources: Mapping[str, Source], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    yield memoryview(_header(names, sources, metadata))
    for name in names:
        tensor = _load(name, sources[name])
        yield memory(tensor)


def _header(names: list[str], sources: Mapping[str, Source], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {RESERVED: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        dtype, shape = sources[name].dtype, sources[name].shape
        if dtype not in _CODES:
            raise TypeError(f"{name!r} is {dtype}, which safetensors cannot hold")
        start, end = end, end + num_bytes(dtype, shape)
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES or strict_json.num_items(text) > strict_json.MAX_ITEMS:
        raise ValueError(f"{len(names)} tensors need a header of {len(text)} bytes: too long")
    return len(text).to_bytes(8, "little") + text


def _load(name: str, source: Source) -> Tensor:
    tensor = source.load().detach().cpu().resolve_conj().resolve_neg().contiguous()
    if (tensor.dtype, tuple(tensor.shape)) != (source.dtype, source.shape):
        raise ValueError(
            f"{name!r} was announced as {source.dtype} {source.shape} and is "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


# --- reading --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A tensor's dtype, shape and place: `start` is its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A file whose header is known and sound. Holds no descriptor, and none of the data but what a
    remote storage read ahead."""

    def __init__(self, path: Place, size: int | None = None) -> None:
        """Reads the header. Raises `CheckpointDamaged` if it is malformed, or if the file is not
        of the given size in bytes."""
        self.path = path
        storage = storage_of(path)
        with storage.open(path) as file:
            self._kept = file if storage.stays_open else None
            self.size = file.size
            if size is not None and self.size != size:
                raise self.damaged(f"is {self.size} bytes, and should be {size}")
            if self.size < 8:
                raise self.damaged(f"is {self.size} bytes, too short for a header")
            prefix = bytearray(8)
            file.read_into(0, memoryview(prefix))
            length = int.from_bytes(prefix, "little")
            if length > min(self.size - 8, _MAX_HEADER_BYTES):
                raise self.damaged(f"header length {length} of a file of {self.size} bytes")
            raw = bytearray(length)
            file.read_into(8, memoryview(raw))
        header = strict_json.parse(bytes(raw), str(path)) if raw.startswith(b"{") else None
        if not isinstance(header, dict):
            raise self.damaged(f"header is not an object, starts with {bytes(raw[:8])!r}")
        self.metadata = self._check_metadata(header.pop(RESERVED, {}))
        self.entries = self._check_entries(header, 8 + length)

    def open(self) -> AbstractContextManager[OpenFile]:
        """To read tensors. Raises `CheckpointDamaged`."""
        return nullcontext(self._kept) if self._kept else storage_of(self.path).open(self.path)

    def damaged(self, what: str) -> CheckpointDamaged:
        """The error to raise when this file turns out to be unsound."""
        return CheckpointDamaged(f"{self.path}: {what}")

    def read(self, name: str) -> Tensor:
        """A new host tensor. Raises `CheckpointDamaged`."""
        entry = self.entries[name]
        out = host_bytes(num_bytes(entry.dtype, entry.shape))
        with self.open() as file:
            file.read_into(entry.start, memory(out))
        return out.view(entry.dtype).view(entry.shape)

    def crc32(self) -> int:
        """CRC-32 of the whole file, read through fixed buffers: of a large local file the
        processors read parts."""
        least = self.size if self._kept else _CHUNK_BYTES
        parts = read_in_parts(self._crc32_of, self.size, least, _PART_BYTES)
        return reduce(lambda a, b: (crc32_combine(a[0], b[0], b[1]), b[1]), parts)[0]

    def _crc32_of(self, first: int, last: int) -> tuple[int, int]:
        """Of the bytes from the first to before the last, and how many these are."""
        step = storage_of(self.path).long_bytes
        crc, buffer = 0, memoryview(bytearray(min(step, last - first)))
        with self.open() as file:
            for start in range(first, last, step):
                chunk = buffer[: last - start]
                file.read_into(start, chunk)
                crc = crc32(chunk, crc)
        return crc, last - first

    def _check_metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
            raise self.damaged(f"{RESERVED} must hold strings")
        return metadata

    def _check_entries(self, header: dict[str, Any], data_start: int) -> dict[str, Entry]:
        entries, spans = {}, []
        for name, item in header.items():
            if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
                raise self.damaged(f"{name!r} is {item!r:.200}: needs dtype, shape, data_offsets")
            code, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
            if not isinstance(code, str) or code not in DTYPES:
                raise self.damaged(f"{name!r} has dtype {code!r}; known are {', '.join(DTYPES)}")
            if not is_shape(shape):
                raise self.damaged(f"{name!r} has shape {shape!r:.200}")
            if not _naturals(offsets) or len(offsets) != 2:
                raise self.damaged(f"{name!r} has data_offsets {offsets!r:.200}")
            start, stop = offsets
            entries[name] = Entry(DTYPES[code], tuple(shape), data_start + start)
            if stop - start != num_bytes(DTYPES[code], tuple(shape)):
                raise self.damaged(f"{name!r}: {code} {shape} does not fill data_offsets {offsets}")
            spans.append((start, stop, name))
        end = 0
        for start, stop, name in sorted(spans):
            if start != end:
                raise self.damaged(f"{name!r} starts at data byte {start}, expected {end}")
            end = stop
        if data_start + end != self.size:
            raise self.damaged(f"is {self.size} bytes, its header promises {data_start + end}")
        return entries


def read_whole(path: Path) -> dict[str, Tensor]:
    """All tensors of a local file, which is mapped into memory: what is not used is not read.

    Raises `CheckpointDamaged` for what the safetensors package refuses, and for tensors that a
    checkpoint cannot hold.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():  # a pipe would be waited for
        raise CheckpointDamaged(f"{path}: is no file")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES or not is_shape([*tensor.shape]):
            what = f"{name!r} is {tensor.dtype} {tuple(tensor.shape)!s:.200}"
            raise CheckpointDamaged(f"{path}: {what}, which a checkpoint cannot hold")
    return tensors


def is_shape(value: Any) -> bool:
    """True if a JSON value is the shape of a tensor that can exist."""
    return (
        _naturals(value)
        and len(value) <= _MAX_DIMS
        and math.prod(max(size, 1) for size in value) < 1 << 63
    )


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
