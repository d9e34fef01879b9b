"""Fuzz targets: the readers of manifests, indexes and shards, each given arbitrary bytes. A reader
must accept the bytes or raise `CheckpointDamaged`.

    uv run --extra test --with atheris python tests/reliability/fuzzed.py -max_total_time=600

lets atheris search for more cases, guided by the parts of the readers that each case reaches.
atheris is not a dependency, since it has wheels for some Pythons only.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import torch

from drivetrain.checkpoint import Manifest
from drivetrain.checkpoint.index.entries import Index, Stride
from drivetrain.checkpoint.manifest import FileEntry
from drivetrain.checkpoint.reader import CheckpointReader
from drivetrain.checkpoint.writer import write_pieces
from drivetrain.kernel.errors import CheckpointDamaged, CheckpointMismatch
from drivetrain.kernel.shards import Box, Flat, Piece, TensorInfo

__all__ = ["SEEDS", "TARGETS"]

NUM_FILES = 40


def manifest(raw: bytes) -> None:
    """Read a manifest. An accepted one must survive writing and reading again."""
    try:
        read = Manifest.from_bytes(raw, "fuzzed")
    except CheckpointDamaged:
        return
    written = read.to_bytes()
    assert Manifest.from_bytes(written, "again").to_bytes() == written


def index(raw: bytes) -> None:
    """Read an index. An accepted one must name the files of any tensor."""
    try:
        read = Index.from_bytes(raw, "fuzzed", NUM_FILES)
    except CheckpointDamaged:
        return
    for tensors in read.kinds.values():
        for known in tensors.values():
            known.parts(None)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzzed-"))


def shard(raw: bytes) -> None:
    """Read a checkpoint that has one weights file, of the promised size."""
    folder = _folder()
    name = "weights-00000-of-00001.safetensors"
    (folder / name).write_bytes(raw)
    manifest = Manifest(1, (FileEntry(name, len(raw), 0),))
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    try:
        reader = CheckpointReader(folder)
        for tensor in reader.names("weights"):
            info = reader.info("weights", tensor)
            read = reader.read("weights", tensor)
            assert (read.dtype, tuple(read.shape)) == (info.dtype, info.shape)
            assert read.nbytes <= len(raw)
    except (CheckpointDamaged, CheckpointMismatch):
        return


TARGETS: dict[str, Callable[[bytes], None]] = {"manifest": manifest, "index": index, "shard": shard}


def _a_manifest() -> bytes:
    names = [f"{kind}-0000{n}-of-00002.safetensors" for kind in ("weights", "state") for n in "01"]
    files = tuple(FileEntry(name, 8, 1) for name in names)
    state = {"step": 1, "position": {"epoch": 0, "samples": 8}, "metrics": {"loss": float("nan")}}
    return Manifest(1, files, state, {"a": [1, None]}, "cpu", 2, (("a", "b"),)).to_bytes()


def _an_index() -> bytes:
    made, info = Index(), TensorInfo(torch.float32, (80, 3))
    made.add("weights", "rows", info, [Stride(0, Box((0, 0), (2, 3)), NUM_FILES, 1, (2, 0))])
    made.add("optimizer", "flat/m", info, [Stride(3, Flat(0, 120)), Stride(5, Flat(120, 240))])
    return made.to_bytes()


def _a_shard() -> bytes:
    folder = Path(tempfile.mkdtemp(prefix="fuzzed-"))
    whole = torch.arange(6.0).view(2, 3)
    pieces = [
        Piece("weights", "whole", whole, (2, 3)),
        Piece("weights", "parts", whole.flatten()[:2], (2, 3), Flat(0, 2)),
        Piece("weights", "parts", whole.flatten()[2:], (2, 3), Flat(2, 6)),
        Piece("weights", "small", torch.ones(3, dtype=torch.int16), (3,)),
    ]
    (written,) = write_pieces(folder, pieces, 0, 1)
    return (folder / written.name).read_bytes()


SEEDS: dict[str, Callable[[], bytes]] = {
    "manifest": _a_manifest,
    "index": _an_index,
    "shard": _a_shard,
}


def _functions(package: str) -> Iterator[FunctionType]:
    """Yield the functions of a package's loaded modules, and of their classes."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            things = list(vars(module).values())
            things += [
                each for kind in things if isinstance(kind, type) for each in vars(kind).values()
            ]
            yield from (
                each
                for each in things
                if isinstance(each, FunctionType) and each.__module__.startswith(package)
            )


def fuzz() -> None:
    """Let atheris fuzz all targets; the first byte of the input selects one."""
    import atheris

    corpus = Path(tempfile.mkdtemp(prefix="corpus-"))
    names = sorted(TARGETS)
    for number, name in enumerate(names):
        (corpus / name).write_bytes(bytes([number]) + SEEDS[name]())

    def one(raw: bytes) -> None:
        if raw:
            TARGETS[names[raw[0] % len(names)]](raw[1:])

    for function in _functions("drivetrain.checkpoint"):
        atheris.instrument_func(function)
    atheris.Setup([*sys.argv, str(corpus), "-max_len=65536"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    fuzz()
