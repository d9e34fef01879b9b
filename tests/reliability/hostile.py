"""Some hundreds of hostile or damaged checkpoints, made by code.

Each `Case` alters a copy of a sound checkpoint. Sums and sizes are updated to match, so that the
check under test is what refuses it. `open_all` opens the checkpoints as a user would, in a process
whose memory is bounded, and reports the result of each.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle  # house: pickle
import resource
import shutil
import signal
import socket
import tarfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint import CheckpointReader, list_checkpoints
from drivetrain.checkpoint.format import strict_json
from drivetrain.checkpoint.writer import write_pieces
from drivetrain.kernel.errors import CheckpointDamaged, CheckpointError, DrivetrainError
from drivetrain.kernel.shards import Box, Flat, Piece
from drivetrain.trainer.fit import fit

from .runs import SETTINGS, recipe

NAME = "checkpoint-000002"
WEIGHTS, OPTIMIZER, STATE = (
    f"{kind}-00000-of-00001.safetensors" for kind in ("weights", "optimizer", "state")
)
SHARDS = (WEIGHTS, OPTIMIZER, STATE)
TWO = dataclasses.replace(
    SETTINGS, steps=2, checkpoint=dataclasses.replace(SETTINGS.checkpoint, every=2)
)
THREE = dataclasses.replace(TWO, steps=3)
MEMORY_BYTES = 2 << 30
"""Bytes that opening a checkpoint may take beyond what the process already has."""
SECONDS = 20

Alter = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A hostile checkpoint."""

    name: str
    alter: Alter
    """Called with the folder of a copy."""
    named: str = ""
    """Text that the error must contain."""
    trusted_by_name: bool = False
    """True if a listing refuses it, but a user who names the folder may open it."""


# --- making them --------------------------------------------------------------------------------


def sound(root: Path) -> Path:
    """Save the checkpoint that all cases are made from."""
    fit(recipe(), TWO, backend="cpu", out=root)
    return root / "checkpoints" / NAME


def manifest_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    return value


def sign(folder: Path, value: dict[str, Any], files: bool = True) -> None:
    """Write a manifest with sums and sizes that match the files."""
    value.pop("crc32", None)
    for entry in value["files"] if files else ():
        path = folder / entry["name"]
        if path.is_file() and path.stat().st_size < 1 << 30:
            raw = path.read_bytes()
            entry |= {"num_bytes": len(raw), "crc32": zlib.crc32(raw)}
    value["crc32"] = zlib.crc32(strict_json.dump(value))
    (folder / "manifest.json").write_bytes(strict_json.dump(value))


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Alter:
    def alter(folder: Path) -> None:
        value = manifest_of(folder)
        change(value)
        if "files" not in value or "crc32" not in value:
            (folder / "manifest.json").write_text(json.dumps(value))
            return
        try:
            sign(folder, value, files=False)
        except (TypeError, ValueError, AttributeError):  # what JSON does not hold
            (folder / "manifest.json").write_text(json.dumps(value))

    return alter


def put(*path: Any, value: Any) -> Alter:
    """Return a function that sets one value in the manifest."""

    def change(manifest: Any) -> None:
        *inner, last = path
        for key in inner:
            manifest = manifest[key]
        manifest[last] = value

    return in_manifest(change)


def raw_manifest(raw: bytes) -> Alter:
    return lambda folder: (folder / "manifest.json").write_bytes(raw)


def text_of_manifest(change: Callable[[str], str]) -> Alter:
    def alter(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(change(path.read_text()))

    return alter


def shard(name: str, raw: bytes | Callable[[bytes], bytes]) -> Alter:
    """Put bytes in the place of a shard, sums and sizes with them."""

    def alter(folder: Path) -> None:
        path = folder / name
        path.write_bytes(raw if isinstance(raw, bytes) else raw(path.read_bytes()))
        sign(folder, manifest_of(folder))

    return alter


def header(name: str, change: Callable[[dict[str, Any]], Any]) -> Alter:
    """Return a function that alters the header of a shard. If `change` returns a value, it is the
    new header.
    """

    def rewrite(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        value = json.loads(raw[8 : 8 + length])
        changed = change(value)
        new = changed if changed is not None else value
        text = new if isinstance(new, bytes) else json.dumps(new).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    return shard(name, rewrite)


def entry(name: str, **changes: Any) -> Alter:
    """Return a function that alters the first tensor's entry in the header of a shard."""

    def change(value: dict[str, Any]) -> None:
        first = next(key for key in value if key != "__metadata__")
        value[first] |= changes

    return header(name, change)


def sparse(name: str, size: int, start: bytes = b"") -> Alter:
    """Return a function that makes a sparse file: large, but without data on the disk."""

    def alter(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)
        value = manifest_of(folder) if name != "manifest.json" else None
        if value is not None:
            for item in value["files"]:
                if item["name"] == name:
                    item["num_bytes"] = size
            sign(folder, value, files=False)

    return alter


def instead(name: str, make: Callable[[Path], object]) -> Alter:
    """Return a function that replaces a file by something that is not a file."""

    def alter(folder: Path) -> None:
        path = folder / name
        path.rename(folder.parent.parent / f"moved-{name}")
        make(path)

    return alter


def parts(change: Callable[[dict[str, Any]], object]) -> Alter:
    """Return a function that makes a checkpoint of two ranks, and alters the parts that the second
    weights file names.
    """

    def alter(folder: Path) -> None:
        reader = CheckpointReader(folder)
        tensors = {name: reader.read("weights", name) for name in reader.names("weights")}
        (folder / WEIGHTS).unlink()
        written = []
        for rank in range(2):
            pieces = []
            for name, tensor in tensors.items():
                half = tensor.numel() // 2
                region = (Flat(0, half), Flat(half, tensor.numel()))[rank]
                flat = tensor.flatten()[region.start : region.stop]
                pieces.append(Piece("weights", name, flat, tuple(tensor.shape), region))
            written += write_pieces(folder, pieces, rank, 2)
        value = manifest_of(folder)
        value["files"] = [item for item in value["files"] if item["name"] != WEIGHTS]
        value["files"] += [dataclasses.asdict(file) for file in written]
        sign(folder, value)

        def labels(value: dict[str, Any]) -> None:
            found = json.loads(value["__metadata__"]["drivetrain"])
            change(found)
            value["__metadata__"]["drivetrain"] = json.dumps(found)

        header(written[1].name, labels)(folder)

    return alter


class Canary:
    """A pickle that leaves a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path,)


def pickles(canary: Path) -> dict[str, bytes]:
    """Return payloads that run code when loaded, in each wrapping that loaders accept."""
    bird = Canary(str(canary))
    found = {f"protocol {p}": pickle.dumps(bird, p) for p in range(pickle.HIGHEST_PROTOCOL + 1)}
    for name, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save(
            {"w": torch.ones(2), "bird": bird}, buffer, _use_new_zipfile_serialization=zipped
        )
        found[f"torch {name}"] = buffer.getvalue()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("pickle", "sys_info", "storages", "tensors"):
            item = tarfile.TarInfo(name)
            item.size = len(found["protocol 2"])
            tar.addfile(item, io.BytesIO(found["protocol 2"]))
    found["torch tar"] = buffer.getvalue()
    found["eval"] = b"cbuiltins\neval\n(S'__import__(\"os\").makedirs(%r)'\ntR." % str(canary)
    found["posix"] = b"cos\nsystem\n(S'mkdir -p %s'\ntR." % str(canary).encode()
    return found


# --- the corpus ---------------------------------------------------------------------------------

HUGE = 1 << 70
_KEYS_ONE_TWICE = b"{" + b"".join(b'"%d":1,' % i for i in range(200_000)) + b'"199999":1}'
_STEERS = "\x1b[2J\x1b]0;mine\x07 [/b] \u202e \ud800"
"""Text that clears the screen, sets a title, is markup, reverses the direction, and cannot be
encoded.
"""
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "a fraction": 1.5,
    "nan": {"$float": "nan"},
    "a text": "x",
    "an empty list": [],
    "a list": [[1]],
    "an empty object": {},
}


def corpus(canary: Path) -> Iterator[Case]:
    """Yield all hostile checkpoints. Names are unique."""
    yield from _manifest_texts(canary)
    yield from _manifest_values()
    yield from _file_lists()
    yield from _shards(canary)
    yield from _headers()
    yield from _parts()
    yield from _things_that_are_no_files()
    yield from _states()


def _manifest_texts(canary: Path) -> Iterator[Case]:
    texts = {
        "empty": b"",
        "a null byte": b"\0",
        "no JSON": b"manifest",
        "a list": b"[]",
        "an object": b"{}",
        "UTF-16": "{}".encode("utf-16"),
        "a mark before it": b"\xef\xbb\xbf{}",
        "bad UTF-8": b'{"format": "\xff"}',
        "deep lists": b"[" * 100_000,
        "closed deep lists": b"[" * 500 + b"]" * 500,
        "deep objects": b'{"a":' * 100_000,
        "millions of lists": b"[" + b"[]," * 16_000_000 + b"[]]",
        "millions of objects": b"[" + b'{"":[[[]]]},' * 4_000_000 + b"1]",
        "a number of a megabyte": b'{"step": ' + b"9" * (1 << 20) + b"}",
        "a gzip": b"\x1f\x8b\x08\x00" + bytes(20),
        "a key twice among many": _KEYS_ONE_TWICE,
        "much under a long key": b'{"%s": [%s0]}' % (b"k" * 1_000_000, b"0," * 500_000),
        "an overflow of a megabyte": b'{"step": ' + b"9" * (1 << 20) + b".0}",
    }
    for name, raw in texts.items():
        yield Case(f"manifest: {name}", raw_manifest(raw), "manifest.json")
    for name, raw in pickles(canary).items():
        yield Case(f"manifest: a pickle, {name}", raw_manifest(raw), "manifest.json")
    for size in (64 << 20 | 1, 10 << 30):
        yield Case(f"manifest: {size} bytes", sparse("manifest.json", size, b"{"), "manifest.json")
    for tenths in range(10):
        truncate: Callable[[str], str] = lambda text, t=tenths: text[: len(text) * t // 10]  # noqa: E731
        yield Case(f"manifest: {tenths} tenths of it", text_of_manifest(truncate), "manifest.json")
    for word in ("NaN", "Infinity", "-Infinity", "1e999", "-0x1", "01", "9" * 5000):
        put_in: Callable[[str], str] = lambda text, w=word: text.replace(  # noqa: E731
            '"step": 2', f'"step": {w}'
        )
        yield Case(f"manifest: step is {word[:20]}", text_of_manifest(put_in), "manifest.json")
    for key in ("step", "files", "format", "state", "crc32", "version"):
        twice: Callable[[str], str] = lambda text, k=key: text.replace(  # noqa: E731
            f'"{k}":', f'"{k}": 2, "{k}":', 1
        )
        yield Case(f"manifest: {key} twice", text_of_manifest(twice), "manifest.json")


def _manifest_values() -> Iterator[Case]:
    may_be = {
        "step": set(),
        "world_size": set(),
        "driver": {"a text"},
        "state": set(),
        "settings": {"an empty object"},
        "tied": {"an empty list"},
        "files": set(),
        "format": set(),
        "version": set(),
    }
    for key, sound_values in may_be.items():
        for name, value in VALUES.items():
            if name not in sound_values:
                named = "" if name.startswith("an empty") else "manifest.json"
                yield Case(f"manifest: {key} is {name}", put(key, value=value), named)
        without = in_manifest(lambda value, key=key: value.pop(key))  # type: ignore[misc]
        yield Case(f"manifest: no {key}", without, "manifest.json")
    for version in (0, 2, 99, HUGE, "1"):
        yield Case(f"manifest: version {version!r}", put("version", value=version), "version")
    yield Case("manifest: another key", put("more", value=1), "manifest.json")
    yield Case("manifest: another format", put("format", value="torch"), "manifest.json")
    another = put("step", value=3)
    yield Case("manifest: another step", another, "of step 3", trusted_by_name=True)
    far = put("step", value=10**17)
    yield Case("manifest: a far step", far, "of step 1000000", trusted_by_name=True)
    yield Case("manifest: a huge step", put("step", value=HUGE), "step")
    for name, tied in {"of nobody": [[]], "of numbers": [[1]], "of lists": [[["a"]]]}.items():
        yield Case(f"manifest: tied {name}", put("tied", value=tied), "manifest.json")
    for floats in ("NaN", "1", 1, None, "infinity"):
        value = {"$float": floats}
        yield Case(f"manifest: a float {floats!r}", put("state", "x", value=value), "manifest.json")
    reserved = put("state", "$x", value=1)
    yield Case("manifest: a key that is reserved", reserved, "manifest.json")
    sealed = text_of_manifest(lambda text: text.replace('"driver": "cpu"', '"driver": "cpv"'))
    yield Case("manifest: altered under its sum", sealed, "manifest.json")


def _file_lists() -> Iterator[Case]:
    names = [
        "../x", "../../x", "..", ".", "", "/etc/passwd", "/dev/zero", "~/x", "manifest.json",
        "optimizer.pt", "weights", f"../{NAME}/{WEIGHTS}", f"./{WEIGHTS}", f"/{WEIGHTS}",
        f"{WEIGHTS}\0", f"{WEIGHTS}\n", f" {WEIGHTS}", f"x/{WEIGHTS}", f"{WEIGHTS}/..",
        WEIGHTS.replace("0", "٠"), WEIGHTS.upper(), WEIGHTS.replace("-", "\\"),
        "weights-0-of-1.safetensors", "weights-0000000000-of-0000000001.safetensors",
        "pickles-00000-of-00001.safetensors", "w" * 100_000, "/canary", "file:///etc/passwd",
        "s3://bucket/x", "con", "\ud800",
    ]  # fmt: skip
    for number, name in enumerate(names):
        alter = put("files", 0, "name", value=name)
        yield Case(f"files: name {number}, {name[:20]!r}", alter, "manifest.json")
    for key in ("name", "num_bytes", "crc32"):
        for name, value in VALUES.items():
            alter = put("files", 0, key, value=value)
            named = "" if (key, name) == ("name", "a text") else "manifest.json"
            yield Case(f"files: {key} is {name}", alter, named)
        without = in_manifest(lambda value, key=key: value["files"][0].pop(key))  # type: ignore[misc]
        yield Case(f"files: no {key}", without, "manifest.json")
    for size in (0, 7, 1 << 31, 1 << 63, 1 << 64, HUGE, 10**4000):
        alter = put("files", 0, "num_bytes", value=size)
        yield Case(f"files: {str(size)[:30]} bytes", alter, WEIGHTS)
    for crc in (0, 1 << 32, HUGE):
        yield Case(f"files: crc {crc}", put("files", 0, "crc32", value=crc), "CRC-32")
    for name, value in {"a number": 1, "a list": [], "null": None, "a name": WEIGHTS}.items():
        yield Case(f"files: an entry is {name}", put("files", 0, value=value), "manifest.json")
    yield Case("files: more in one", put("files", 0, "path", value="/etc/passwd"), "manifest.json")
    again = in_manifest(lambda value: value["files"].append(value["files"][0]))
    yield Case("files: one twice", again, "manifest.json")
    none = in_manifest(
        lambda value: value.update(
            files=[item for item in value["files"] if not item["name"].startswith("weights")]
        )
    )
    yield Case("files: no weights", none)


def _shards(canary: Path) -> Iterator[Case]:
    for name in SHARDS:
        for what, raw in pickles(canary).items():
            yield Case(f"{name}: a pickle, {what}", shard(name, raw), name)
        for size in (0, 1, 7, 8, 9):
            truncate: Callable[[bytes], bytes] = lambda raw, n=size: raw[:n]  # noqa: E731
            yield Case(f"{name}: {size} bytes", shard(name, truncate), name)
        yield Case(f"{name}: its last byte is gone", shard(name, lambda raw: raw[:-1]), name)
        yield Case(f"{name}: a byte too many", shard(name, lambda raw: raw + b"\0"), name)
        lengths = (0, 1, 10**8 + 1, (1 << 31), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
        for length in lengths:
            yield Case(f"{name}: a header of {length} bytes", shard(name, _long(length)), name)
    prefix = (99_000_000).to_bytes(8, "little")
    yield Case("shard: a sparse header of 99 MB", sparse(WEIGHTS, 1 << 30, prefix + b"{"), WEIGHTS)
    prefix = (4 << 30).to_bytes(8, "little")
    yield Case("shard: a sparse header of 4 GB", sparse(WEIGHTS, 5 << 30, prefix + b"{"), WEIGHTS)
    yield Case("shard: a sparse terabyte", sparse(OPTIMIZER, 1 << 40), OPTIMIZER)
    swap = [(WEIGHTS, OPTIMIZER), (WEIGHTS, STATE), (OPTIMIZER, STATE)]
    for one, other in swap:

        def exchange(folder: Path, one: str = one, other: str = other) -> None:
            (folder / one).rename(folder / "x")
            (folder / other).rename(folder / one)
            (folder / "x").rename(folder / other)
            sign(folder, manifest_of(folder))

        yield Case(f"shard: {one} and {other} exchanged", exchange)
    for bit in (0, 70, 8 * 300 + 1):

        def flip(folder: Path, bit: int = bit) -> None:
            raw = bytearray((folder / WEIGHTS).read_bytes())
            raw[-1 - bit // 8] ^= 1 << bit % 8
            (folder / WEIGHTS).write_bytes(raw)

        yield Case(f"shard: a flipped bit {bit}", flip, WEIGHTS)


def _long(length: int) -> Callable[[bytes], bytes]:
    return lambda raw: length.to_bytes(8, "little") + raw[8:]


def _entry(name: str = "a", **other: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **other}
    return json.dumps({name: tensor}).encode()


def _headers() -> Iterator[Case]:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    texts: dict[str, bytes] = {
        "a list": b"[]",
        "a space first": b" {}",
        "more after it": b"{}x",
        "deep": b'{"a":' * 100_000,
        "bad UTF-8": b'{"\xff": 1}',
        "a pickle": b"\x80\x04}\x94.",
        "a name twice": b'{"a":%s,"a":%s}' % ((json.dumps(tensor).encode(),) * 2),
        "millions of items": b"{" + b'"a":[[[[]]]],' * 5_000_000 + b'"b":1}',
        "a number of a megabyte": b'{"a":' + b"9" * (1 << 20) + b"}",
        "NaN": b'{"a": NaN}',
        "a name twice among many": _KEYS_ONE_TWICE,
        "a long dtype": _entry(dtype="F" * 5_000_000),
        "a long shape": _entry(shape=[1] * 500_000),
        "a long name": _entry(name="n" * 5_000_000, dtype="F31"),
        "long offsets": _entry(data_offsets=[10**4000, 10**4000 + 4]),
    }
    for name, raw in texts.items():
        new = header(WEIGHTS, lambda value, raw=raw: raw)  # type: ignore[misc]
        yield Case(f"header: {name}", new, WEIGHTS)
    entries: dict[str, Any] = {
        "dtype": ["F31", "f32", "", 32, None, ["F32"], {"a": 1}, "F64", "I8", "O"],
        "shape": [
            [-1], [-1, -1], [1.0], ["1"], [True], [None], "1", None, 4, {}, [[1]],
            [1 << 62, 1 << 62], [0, 1 << 62, 1 << 62], [1] * 65, [HUGE], [1 << 40], [10**400],
        ],
        "data_offsets": [
            [0], [], None, "04", [0, 1, 2], [4, 0], [-4, 0], [0, 1 << 63], [0, 1 << 64], [0, HUGE],
            [HUGE, HUGE], [1 << 63, 1 << 63], [0.0, 4.0], [False, 4], ["0", "4"], [[0], [4]], {},
        ],
    }  # fmt: skip
    for name in (WEIGHTS, OPTIMIZER):
        for key, values in entries.items():
            for value in values:
                alter = entry(name, **{key: value})
                yield Case(f"header of {name}: {key} {str(value)[:40]!r}", alter, name)
        yield Case(f"header of {name}: another key", entry(name, more=1), name)
        overlap: Alter = header(name, _overlapping)
        yield Case(f"header of {name}: overlapping", overlap, name)
        yield Case(f"header of {name}: a gap", header(name, _gap), name)
        for value in (None, [], 7, {"a": 1}, {"a": None}, {"drivetrain": "["}):
            odd = header(name, lambda header, v=value: header.update({"__metadata__": v}))  # type: ignore[misc]
            yield Case(f"header of {name}: metadata {value!r}", odd, name)
    steering = header(
        WEIGHTS, lambda value: {f"{k}{_STEERS}" if k[0] != "_" else k: v for k, v in value.items()}
    )
    yield Case("header: names that steer the terminal", steering)
    kinds = header(WEIGHTS, lambda value: _same_size(value, "F32", "I32"))
    yield Case("header: floats said to be integers", kinds)
    renamed = header(
        WEIGHTS, lambda value: {f"x{k}" if k[0] != "_" else k: v for k, v in value.items()}
    )
    yield Case("header: weights of another model", renamed)
    turned = header(WEIGHTS, _turned)
    yield Case("header: a shape of another model", turned)


def _tensors(value: dict[str, Any]) -> list[dict[str, Any]]:
    found = [item for key, item in value.items() if key != "__metadata__"]
    return sorted(found, key=lambda item: item["data_offsets"])


def _overlapping(value: dict[str, Any]) -> None:
    first, second = _tensors(value)[:2]
    start, stop = second["data_offsets"]
    second["data_offsets"] = [start - 4, stop - 4]
    assert first["data_offsets"][1] > start - 4


def _gap(value: dict[str, Any]) -> None:
    last = _tensors(value)[-1]
    start, stop = last["data_offsets"]
    last["data_offsets"] = [start + 4, stop + 4]


def _same_size(value: dict[str, Any], old: str, new: str) -> None:
    for item in _tensors(value):
        if item["dtype"] == old:
            item["dtype"] = new


def _turned(value: dict[str, Any]) -> None:
    for item in _tensors(value):
        item["shape"] = item["shape"][::-1] if len(item["shape"]) > 1 else [1, *item["shape"]]


def _parts() -> Iterator[Case]:
    def label(**changes: Any) -> Alter:
        def change(found: dict[str, Any]) -> None:
            next(iter(found.values())).update(changes)

        return parts(change)

    second = "weights-00001-of-00002.safetensors"
    wrong: dict[str, list[Any]] = {
        "name": [None, 7, [], {}],
        "shape": [None, 4, [-1], ["1"], [1.0], [True], [1 << 62, 4], [HUGE], [10**400], [1] * 65,
                  []],
        "flat": [None, 7, [], [0], [0, 1, 2], [-1, 1], [1, 0], [0.0, 1.0], ["0", "1"], [0, HUGE],
                 [HUGE, HUGE], [False, 1], [0, 1 << 63]],
        "box": [[[0], [1]], [[0, 0, 0], [1, 1, 1]], None],
        "more": [1],
    }  # fmt: skip
    for key, values in wrong.items():
        for value in values:
            yield Case(f"part: {key} {str(value)[:40]!r}", label(**{key: value}), second)
    yield Case("part: of nothing", parts(lambda found: found.update(other={})), second)
    yield Case("part: of another tensor", label(name="nobody"))
    yield Case("part: of a tensor of terabytes", label(shape=[1 << 40]))
    yield Case("part: of one that holds none", parts(lambda found: found.clear()))

    def moved(found: dict[str, Any]) -> None:
        for item in found.values():
            length = item["flat"][1] - item["flat"][0]
            item["flat"] = [0, length]

    yield Case("part: over another", parts(moved))
    for name, changed in {"one gone": slice(1, None), "one twice": slice(None)}.items():
        yield Case(f"part: {_COLUMNS} columns, {name}", _columns(changed, name == "one twice"))
    yield Case("index: long runs without number", _runs)


_COLUMNS = 5_000


def _columns(kept: slice, twice: bool) -> Alter:
    """Return a function that saves a tensor of the model in very many columns."""

    def alter(folder: Path) -> None:
        reader = CheckpointReader(folder)
        name = next(n for n in reader.names("weights") if len(reader.info("weights", n).shape) > 1)
        tensor, shape = torch.zeros(2, 1), (2, _COLUMNS)
        boxes = [Box((0, column), (2, 1)) for column in range(_COLUMNS)][kept]
        boxes += boxes[:1] if twice else []
        pieces = [Piece("weights", name, tensor, shape, box) for box in boxes]
        (folder / WEIGHTS).unlink()
        write_pieces(folder, pieces, 0, 1)
        sign(folder, manifest_of(folder))

    return alter


def _runs(folder: Path) -> None:
    """Write an index that describes very many pieces in few bytes."""
    files = 2000
    run = {"part": 0, "flat": [0, 1], "count": files, "every": 1, "by": [1]}
    known = {"dtype": "F32", "shape": [1 << 40], "runs": [run] * 20_000}
    index = {"format": "drivetrain-index", "version": 1, "state": {}, "optimizer": {}}
    (folder / "index.json").write_text(json.dumps({**index, "weights": {"w": known}}))
    value = manifest_of(folder)
    value["files"] += [
        {"name": f"weights-{n:05}-of-{files:05}.safetensors", "num_bytes": 1, "crc32": 0}
        for n in range(1, files)
    ]
    value["files"].append({"name": "index.json", "num_bytes": 0, "crc32": 0})
    sign(folder, value)


def _things_that_are_no_files() -> Iterator[Case]:
    def listen(path: Path) -> None:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(here)

    makers: dict[str, Callable[[Path], object]] = {
        "a link out": lambda path: path.symlink_to(
            path.parent.parent.parent / f"moved-{path.name}"
        ),
        "a link to nowhere": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to the memory": lambda path: path.symlink_to("/proc/self/mem"),
        "a pipe": os.mkfifo,
        "a link to a pipe": lambda path: (os.mkfifo(f"{path}-p"), path.symlink_to(f"{path}-p")),
        "a folder": Path.mkdir,
        "a link to a folder": lambda path: path.symlink_to("."),
        "a socket": listen,
        "nothing": lambda path: None,
    }
    for name in (*SHARDS, "manifest.json"):
        for what, make in makers.items():
            yield Case(f"{name} is {what}", instead(name, make), "" if "man" in name else name)

    def linked(folder: Path) -> None:
        folder.rename(folder.parent.parent / "elsewhere")
        folder.symlink_to(folder.parent.parent / "elsewhere")

    yield Case("the folder is a link", linked, "is a link", trusted_by_name=True)

    def file(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.write_text("a file")

    yield Case("the folder is a file", file, NAME)


def _states() -> Iterator[Case]:
    for key in ("step", "applied", "skipped", "items", "samples"):
        for name, value in {**VALUES, "huge": HUGE, "2**63": 1 << 63}.items():
            if (key, name) != ("items", "a fraction"):
                yield Case(f"state: {key} is {name}", put("state", key, value=value), NAME)
        gone = in_manifest(lambda value, key=key: value["state"].pop(key))  # type: ignore[misc]
        yield Case(f"state: no {key}", gone, NAME)
    for key in ("epoch", "samples"):
        for name, value in {**VALUES, "huge": HUGE, "2**63": 1 << 63}.items():
            alter = put("state", "position", key, value=value)
            yield Case(f"position: {key} is {name}", alter, NAME)
    for name, value in VALUES.items():
        yield Case(f"state: position is {name}", put("state", "position", value=value), NAME)
        if name not in ("null", "an empty object", "an empty list"):
            yield Case(f"state: window is {name}", put("state", "window", value=value), NAME)
            alter = put("state", "metrics", value=value)
            yield Case(f"state: metrics are {name}", alter, NAME)
        if name not in ("null", "an empty object"):
            alter = put("state", "window", "losses", value=value)
            yield Case(f"window: losses are {name}", alter, NAME)
        alter = put("state", "window", "first_step", value=value)
        yield Case(f"window: first step is {name}", alter, NAME)
    for losses in (["nan"], [10**400], [[1.0]], [{}], [True]):
        alter = put("state", "window", "losses", value=losses)
        yield Case(f"window: losses {str(losses)[:30]}", alter, NAME)
    yield Case("position: more", put("state", "position", "more", value=1), NAME)
    yield Case("position: a state", put("state", "position", "state", value=[]), NAME)


# --- opening them -------------------------------------------------------------------------------


def open_all(base: Path, root: Path, canary: Path, report: Path, names: list[str]) -> None:
    """Open each of the named checkpoints, and write the results as JSON lines. Runs in a process of
    its own.
    """
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    _open(base)  # what is loaded when it is first needed is here before memory is bounded
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    with report.open("w") as file:
        chosen = [case for case in corpus(canary) if case.name in set(names)]
        for number, case in enumerate(chosen):
            folder = root / str(number) / "checkpoints" / NAME
            shutil.copytree(base, folder)
            case.alter(folder)
            started = time.process_time()
            # of its own, since others may be at work here; and at most, for what waits
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(6 * SECONDS)
            named = _open(folder)
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            named |= {"name": case.name, "seconds": time.process_time() - started}
            named["canary"] = canary.exists()
            file.write(json.dumps(named) + "\n")
            file.flush()
            shutil.rmtree(root / str(number))


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"took more than {SECONDS} seconds")


def _open(folder: Path) -> dict[str, Any]:
    """Return the results of listing, reading all, verifying and resuming: '', or the type and text
    of an error.
    """
    acts: dict[str, Callable[[Path], object]] = {
        "list": _list,
        "read": _read,
        "verify": _verify,
        "resume": _resume,
        "resume blindly": _resume_blindly,
    }
    named = {}
    for name, act in acts.items():
        try:
            act(folder)
            named[name] = ""
        except DrivetrainError as error:
            named[name] = f"{type(error).__name__}: {error}"
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
            named[name] = f"NOT OURS {type(error).__name__}: {error!s:.500} at {places}"
    return named


def _list(folder: Path) -> None:
    for rejected in list_checkpoints(folder.parent).rejected:
        raise CheckpointError(rejected.reason)
    if not list_checkpoints(folder.parent).complete:
        raise CheckpointError(f"{folder}: is not listed")


def _read(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for kind in ("weights", "optimizer", "state"):
        for name in reader.names(kind):
            reader.info(kind, name)
            reader.read(kind, name)


def _verify(folder: Path) -> None:
    if problems := CheckpointReader(folder).verify():
        raise CheckpointDamaged(problems[0])


def _resume(folder: Path) -> None:
    fit(recipe(), THREE, backend="cpu", resume=folder)


def _resume_blindly(folder: Path) -> None:
    blind = dataclasses.replace(THREE.checkpoint, verify=False)
    fit(recipe(), dataclasses.replace(THREE, checkpoint=blind), backend="cpu", resume=folder)
