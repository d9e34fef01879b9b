"""Reads and writes the safetensors format, one tensor in memory at a time. Whole files that others
wrote are read by the safetensors package.

A file is 8 bytes of header length (little-endian), a JSON header padded with spaces to 8 bytes,
and the tensors' bytes, row after row, with neither gaps nor overlaps
(https://github.com/huggingface/safetensors). The reader believes nothing it has not checked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
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
    "header_by_safetensors",
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
"""The only key of a header that is not a tensor; its values are strings."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 4 << 20
_PART_BYTES = 64 << 20
"""Bytes that a reader thread reads at a time; small enough that all threads end at about the same
time."""
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 64


# --- writing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A tensor to write. `load` is called when the tensor is written, and again if writing the file
    has to start over."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """Return the source of a tensor that is in memory, or mapped into it."""
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
            else:  # computed while the block is written: neither holds the GIL
                summed = beside.submit(crc32, chunk, crc)
                yield chunk
                crc = summed.result()

    with ThreadPoolExecutor(1, "checksum") as beside:  # a thread only where one is needed
        storage_of(path).create(path, chunks)
    return size, crc


def checksum(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> tuple[int, int]:
    """Return the size in bytes and the CRC-32 of the file that `write` would write."""
    size = crc = 0
    for chunk in _chunks(sources, metadata):
        size, crc = size + len(chunk), crc32(chunk, crc)
    return size, crc


def _chunks(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Yield the bytes of the file."""
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
    """A file whose header was read and checked. Holds no open descriptor, and no data except what a
    remote storage has read ahead."""

    def __init__(self, path: Place, size: int | None = None) -> None:
        """Read the header. Raises `CheckpointDamaged` if it is malformed, or if the file is not of
        the given size in bytes."""
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
        """Open the file to read tensors. Raises `CheckpointDamaged`."""
        return nullcontext(self._kept) if self._kept else storage_of(self.path).open(self.path)

    def damaged(self, what: str) -> CheckpointDamaged:
        """Return the error to raise if this file is damaged."""
        return CheckpointDamaged(f"{self.path}: {what}")

    def read(self, name: str) -> Tensor:
        """Read a tensor into new host memory. Raises `CheckpointDamaged`."""
        return self.read_entry(self.entries[name])

    def read_entry(self, entry: Entry) -> Tensor:
        """Read one of `entries` as `read` does."""
        out = host_bytes(num_bytes(entry.dtype, entry.shape))
        with self.open() as file:
            file.read_into(entry.start, memory(out))
        return out.view(entry.dtype).view(entry.shape)

    def crc32(self) -> int:
        """Return the CRC-32 of the whole file, read through fixed buffers. Several threads read
        parts of a large local file."""
        least = self.size if self._kept else _CHUNK_BYTES
        parts = read_in_parts(self._crc32_of, self.size, least, _PART_BYTES)
        return reduce(lambda a, b: (crc32_combine(a[0], b[0], b[1]), b[1]), parts)[0]

    def _crc32_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the CRC-32 of the bytes from `first` to before `last`, and the number of bytes."""
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
                raise self.damaged(
                    f"{name!r:.200} is {item!r:.200}: needs dtype, shape, data_offsets"
                )
            code, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
            if not isinstance(code, str) or code not in DTYPES:
                known = ", ".join(DTYPES)
                raise self.damaged(f"{name!r:.200} has dtype {code!r:.200}; known are {known}")
            if not is_shape(shape):
                raise self.damaged(f"{name!r:.200} has shape {shape!r:.200}")
            if not _naturals(offsets) or len(offsets) != 2:
                raise self.damaged(f"{name!r:.200} has data_offsets {offsets!r:.200}")
            start, stop = offsets
            entries[name] = Entry(DTYPES[code], tuple(shape), data_start + start)
            if stop - start != num_bytes(DTYPES[code], tuple(shape)):
                what = f"{name!r:.200}: {code} {shape!s:.200} does not fill data_offsets"
                raise self.damaged(f"{what} {offsets!s:.200}")
            spans.append((start, stop, name))
        end = 0
        for start, stop, name in sorted(spans):
            if start != end:
                what = f"{name!r:.200} starts at data byte {start!s:.40}"
                raise self.damaged(f"{what}, expected {end!s:.40}")
            end = stop
        if data_start + end != self.size:
            promised = str(data_start + end)
            raise self.damaged(f"is {self.size} bytes, its header promises {promised:.40}")
        return entries


def read_whole(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a local file, which is mapped into memory: tensors that are not used
    are not read.

    Raises `CheckpointDamaged` for a file that the safetensors package refuses, and for tensors that
    a checkpoint cannot hold.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():  # opening a pipe would block
        raise CheckpointDamaged(f"{path}: is no file")
    try:
        with _named_in_utf8(path) as name:
            tensors: dict[str, Tensor] = load_file(name)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES or not is_shape([*tensor.shape]):
            what = f"{name!r:.200} is {tensor.dtype} {tuple(tensor.shape)!s:.200}"
            raise CheckpointDamaged(f"{path}: {what}, which a checkpoint cannot hold")
    return tensors


def header_by_safetensors(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtypes and shapes of a local file's tensors as the safetensors package reads them.
    Raises `CheckpointDamaged` for a file that the package refuses."""
    from safetensors import SafetensorError, safe_open

    try:
        with _named_in_utf8(path) as known, safe_open(known, "pt") as file:
            parts = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
            described = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts}
            smallest: dict[str, tuple[int, str]] = {}
            for name, (code, shape) in described.items():
                sized = math.prod(shape), name
                smallest[code] = min(sized, smallest.get(code, sized))
            # a tensor shows which dtype the package reads a code as
            dtypes = {code: file.get_tensor(name).dtype for code, (_, name) in smallest.items()}
            return {name: (dtypes[code], shape) for name, (code, shape) in described.items()}
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointDamaged(f"{path}: {error!s:.400}") from error


@contextmanager
def _named_in_utf8(path: Path) -> Iterator[str]:
    """Yield a name for the file that the safetensors package accepts, which must be UTF-8."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        with TemporaryDirectory(prefix="drivetrain-") as folder:
            link = Path(folder, "file")
            link.symlink_to(path.absolute())
            yield str(link)
        return
    yield os.fspath(path)


def is_shape(value: Any) -> bool:
    """True if a JSON value is the shape of a tensor that can exist."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return False
    product = 1
    for size in value:
        if type(size) is not int or size < 0:
            return False
        product *= size or 1
    return product < 1 << 63


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
