"""The manifest of a checkpoint. It is written last: its presence is the commit."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..kernel.errors import CheckpointDamaged, CheckpointNotFound
from ..kernel.paths import Place
from ..kernel.shards import Kind
from .format import strict_json
from .storage.protocol import MANIFEST, read_small, storage_of

__all__ = [
    "FILE_NAME",
    "FileEntry",
    "FileKind",
    "Manifest",
    "file_name",
    "read_manifest",
    "write_manifest",
]

_FORMAT = "drivetrain-checkpoint"
_VERSION = 1
_SUM = "crc32"
_SUM_LINE = re.compile(rb'\{\n "crc32": ([0-9]{1,10}),')
_MAX_BYTES = 64 << 20
FILE_NAME = re.compile(
    r"(weights|frozen|optimizer|state)-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors"
    r"|index(-[0-9]{5,9}-[0-9]{1,2})?\.json"
)
"""Names of files of a checkpoint. Numbered index files exist only while the checkpoint is
written."""
FileKind = Literal[Kind, "frozen"]
"""The first word of a file's name. `frozen`: frozen weights, if they have separate files."""


def file_name(kind: FileKind, part: int, num_parts: int) -> str:
    """Return the name of one file of a checkpoint; no other names are accepted."""
    return f"{kind}-{part:05d}-of-{num_parts:05d}.safetensors"


@dataclass(frozen=True)
class FileEntry:
    """A file that belongs to the checkpoint, as it was when it was written."""

    name: str
    num_bytes: int
    crc32: int

    @property
    def kind(self) -> str:
        """The kind of the file's tensors; for an index, the name of the index."""
        word = self.name.partition("-")[0]
        return "weights" if word == "frozen" else word

    @property
    def part(self) -> int:
        """The rank that wrote the file; 0 for an index."""
        _, *numbers = self.name.split("-")
        return int(numbers[0]) if numbers else 0


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint that is not a tensor."""

    step: int
    files: tuple[FileEntry, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    """The state of the kernel's loop: position, counters, schedule, `metrics`; JSON types."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, used to print what a resume changes; JSON types."""
    driver: str = ""
    world_size: int = 1
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of FQNs that are one parameter; the first of each is the one stored."""

    def loop_state(self, where: str) -> Mapping[str, Any]:
        """Return `state`, which is empty for a checkpoint of weights alone. Raises
        `CheckpointDamaged`, naming `where`, if it is empty after step 0."""
        if self.step and not self.state:
            raise CheckpointDamaged(f"{where}: is of step {self.step}, and its state is empty")
        return self.state

    def to_bytes(self) -> bytes:
        """Return canonical JSON that includes its own CRC-32. Raises `TypeError` if `state` or
        `settings` hold other types."""
        value = {"format": _FORMAT, "version": _VERSION, **vars(self)}
        value["files"] = [vars(file) for file in self.files]
        return strict_json.dump({**value, _SUM: zlib.crc32(strict_json.dump(value))})

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Parse a manifest. Raises `CheckpointDamaged` with `where`, the malformed entry and its
        value."""

        def need(sound: bool, what: str, seen: Any) -> None:
            if not sound:
                raise CheckpointDamaged(f"{where}: {what} is {seen!r:.200}")

        need(len(raw) <= _MAX_BYTES, f"size in bytes (at most {_MAX_BYTES})", len(raw))
        value = strict_json.parse(raw, where)
        need(isinstance(value, dict), "the top level", value)
        try:
            strict_json.check(value)  # which may have other keys
        except TypeError as error:
            raise CheckpointDamaged(f"{where}: {error}") from error
        need(value.pop("format", None) == _FORMAT, "'format'", value)
        version = value.pop("version", None)
        if type(version) is not int or version != _VERSION:
            raise CheckpointDamaged(
                f"{where}: format version {version!r:.200}, and this drivetrain reads {_VERSION}: "
                "install the drivetrain that wrote it, or a newer one"
            )
        sum_of_all = value.pop(_SUM, None)  # `read_manifest` compares it
        need(_natural(sum_of_all), repr(_SUM), sum_of_all)
        names = {item.name for item in fields(cls)}
        need(value.keys() == names, f"the set of keys (needs {sorted(names)})", sorted(value)[:20])
        need(_natural(value["step"], 10**18), "'step'", value["step"])
        need(_natural(value["world_size"], 1 << 31), "'world_size'", value["world_size"])
        need(isinstance(value["driver"], str), "'driver'", value["driver"])
        for key in ("state", "settings"):
            need(isinstance(value[key], dict), repr(key), value[key])
        tied, entries = value["tied"], value["files"]
        need(
            _lists(tied, list) and all(_lists(group, str) and group for group in tied),
            "'tied'",
            tied,
        )
        need(_lists(entries, dict), "'files'", entries)
        for entry in entries:
            need(entry.keys() == {"name", "num_bytes", "crc32"}, "an entry of 'files'", entry)
            # Only names of our own grammar: none can be absolute, or lead out of the folder.
            name = entry["name"]
            need(isinstance(name, str) and bool(FILE_NAME.fullmatch(name)), "a file name", name)
            need(_natural(entry["num_bytes"], 1 << 63), f"the size of {name}", entry["num_bytes"])
            need(_natural(entry["crc32"], 1 << 32), f"the CRC-32 of {name}", entry["crc32"])
        need(
            len({e["name"] for e in entries}) == len(entries), "a repeated name in 'files'", entries
        )
        value["files"] = tuple(FileEntry(**entry) for entry in entries)
        value["tied"] = tuple(tuple(group) for group in tied)
        return cls(**value)


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest of a checkpoint. Raises `CheckpointNotFound` if the folder does not exist,
    and `CheckpointDamaged` if the manifest is missing, malformed or not as it was written."""
    storage, path = storage_of(folder), folder / MANIFEST
    if not storage.exists(path):
        if not storage.is_folder(folder):
            raise CheckpointNotFound(f"{folder}: no such checkpoint")
        raise CheckpointDamaged(f"{folder}: has no {MANIFEST}, so it was never completed")
    raw = read_small(path, _MAX_BYTES)
    manifest = Manifest.from_bytes(raw, str(path))
    if not _is_as_written(raw):
        raise CheckpointDamaged(f"{path}: is not as it was written")
    return manifest


def _is_as_written(raw: bytes) -> bool:
    """Check a manifest by its own CRC-32. The CRC-32 is the first key, and covers the text without
    that line."""
    line = _SUM_LINE.match(raw)
    return line is not None and int(line[1]) == zlib.crc32(raw[line.end() :], zlib.crc32(b"{"))


def write_manifest(folder: Place, manifest: Manifest) -> None:
    """Write and sync the manifest, and sync the folder. Before writing, raises what reading it back
    would raise, or `TypeError`."""
    path, raw = folder / MANIFEST, manifest.to_bytes()
    Manifest.from_bytes(raw, str(path))
    storage = storage_of(folder)
    storage.create(path, lambda: [memoryview(raw)])
    storage.sync_folder(folder)


def replace_manifest(folder: Place, manifest: Manifest) -> None:
    """Replace the manifest of a complete checkpoint atomically. Raises what `write_manifest`
    raises."""
    path, raw = folder / MANIFEST, manifest.to_bytes()
    Manifest.from_bytes(raw, str(path))
    storage_of(folder).replace(path, raw)


def _natural(value: Any, end: int = 1 << 63) -> bool:
    return type(value) is int and 0 <= value < end


def _lists(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
