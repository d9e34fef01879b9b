"""Tensors of many megabytes are read by several threads, with the same results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint import CheckpointReader, CheckpointStore
from drivetrain.checkpoint.storage.local import LOCAL
from drivetrain.kernel.errors import CheckpointDamaged
from drivetrain.kernel.shards import Box, Flat

from .fakes import piece, region_of, save

NUM_ELEMENTS = (5 * LOCAL.long_bytes + 12) // 4
"""Number of elements of a tensor. The last thread's part is shorter than the others."""


@pytest.fixture(scope="module")
def tensor() -> Tensor:
    return torch.arange(NUM_ELEMENTS, dtype=torch.int32)


@pytest.fixture
def folder(tensor: Tensor, tmp_path: Path) -> Path:
    return save(CheckpointStore(tmp_path), 1, [[piece("long", tensor)]])


def test_all_of_it_and_parts(folder: Path, tensor: Tensor) -> None:
    reader = CheckpointReader(folder)
    assert torch.equal(reader.read("weights", "long"), tensor)
    out = torch.empty_like(tensor)
    assert reader.read("weights", "long", out=out) is out
    assert torch.equal(out, tensor)
    for region in (Flat(7, NUM_ELEMENTS - 1), Box((3,), (NUM_ELEMENTS - 5,))):
        assert torch.equal(reader.read("weights", "long", region), region_of(tensor, region))


@pytest.mark.parametrize("left", [0.99, 0.5, 0.01])
def test_a_file_that_is_truncated_meanwhile_is_named(folder: Path, left: float) -> None:
    reader = CheckpointReader(folder)
    assert reader.names("weights") == ["long"]
    path = next(folder.glob("weights-*"))
    size = int(path.stat().st_size * left)
    os.truncate(path, size)
    with pytest.raises(CheckpointDamaged, match=rf"{path.name}: ends at byte \d+, within a tensor"):
        reader.read("weights", "long")


FORKED = """
import os, signal, torch
from drivetrain.checkpoint import CheckpointReader
def read():
    return torch.equal(CheckpointReader({folder!r}).read("weights", "long"), expected)
expected = torch.arange({size}, dtype=torch.int32)
assert read()
child = os.fork()
if not child:
    signal.alarm(60)  # which ends it, if it waits for a thread that it has not got
    os._exit(0 if read() else 1)
print(os.waitpid(child, 0)[1])
"""


def test_a_fork_of_a_process_that_has_read_can_read(folder: Path) -> None:
    code = FORKED.format(folder=str(folder), size=NUM_ELEMENTS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0", done.stderr
