"""A checkpoint of many ranks: it has an index, and readers open only the files that they need."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import CheckpointReader, CheckpointStore, list_checkpoints, load_rng
from drivetrain.checkpoint.index import piece_locator, tree
from drivetrain.kernel.errors import CheckpointDamaged, SaveFailed
from drivetrain.kernel.shards import Box, Flat

from .fakes import FakeEngine, FakeSession, bits, on_ranks, piece, region_of, save

SIZE = 20
ROWS = torch.arange(SIZE * 6.0).view(2 * SIZE, 3)
FLAT = torch.arange(100.0).view(10, 10)
SCALE = torch.tensor(8.0)


def pieces_of(rank: int, size: int = SIZE) -> list[Any]:
    """Return a rank's pieces: a share of rows, a flat range, a moment, and what one rank alone
    writes.
    """
    edges = [100 * each // size for each in range(size + 1)]
    rows = Box((2 * rank, 0), (2, 3))
    mine = [
        piece("rows", ROWS[: 2 * size], rows),
        piece("rows/moment", ROWS[: 2 * size] * 2, rows, "optimizer"),
        piece("flat", FLAT, Flat(edges[rank], edges[rank + 1])),
    ]
    return [*mine, piece("scale", SCALE, kind="state")] if rank == size - 1 else mine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(CheckpointStore(tmp_path), 1, [pieces_of(rank) for rank in range(SIZE)])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the files of tensors whose headers are read."""
    names: list[str] = []

    class Seen(piece_locator.TensorFile):
        def __init__(self, path: Path, size: int | None = None) -> None:
            names.append(path.name)
            super().__init__(path, size)

    monkeypatch.setattr(piece_locator, "TensorFile", Seen)
    return names


def parts(names: list[str], kind: str) -> list[int]:
    return sorted(int(name.split("-")[1]) for name in names if name.startswith(kind))


def test_a_reader_opens_only_what_a_region_lies_in(folder: Path, opened: list[str]) -> None:
    reader = CheckpointReader(folder)
    assert reader.names("weights") == ["flat", "rows"]
    assert reader.names("optimizer") == ["rows/moment"]
    assert reader.info("weights", "flat").shape == (10, 10)
    assert opened == []
    wanted = Box((7, 1), (4, 2))
    assert bits(reader.read("weights", "rows", wanted)) == bits(region_of(ROWS, wanted))
    assert parts(opened, "weights") == [3, 4, 5]
    assert bits(reader.read("weights", "flat", Flat(12, 29))) == bits(region_of(FLAT, Flat(12, 29)))
    assert parts(opened, "weights") == [2, 3, 4, 5]
    assert bits(reader.read("optimizer", "rows/moment", wanted)) == bits(
        region_of(ROWS * 2, wanted)
    )
    assert parts(opened, "optimizer") == [3, 4, 5]
    assert bits(reader.read("state", "scale")) == bits(SCALE)
    assert parts(opened, "state") == [SIZE - 1]


def test_a_rank_opens_one_file_for_its_random_state(folder: Path, opened: list[str]) -> None:
    reader = CheckpointReader(folder)
    assert reader.names("state") == ["scale"]
    session = FakeSession(7, SIZE)
    session.rng = {"torch": torch.zeros(16, dtype=torch.uint8)}
    assert load_rng(reader, session) == []
    assert int(session.rng["torch"][0]) == 7
    assert opened == [f"state-00007-of-{SIZE:05d}.safetensors"]
    assert load_rng(reader, FakeSession(7, SIZE + 1)) == ["torch"]
    assert len(opened) == 1


def test_few_ranks_write_no_index(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 1, [pieces_of(rank, 8) for rank in range(8)])
    assert not list(folder.glob("index*"))
    assert bits(CheckpointReader(folder).read("weights", "flat")) == bits(FLAT)


@pytest.mark.parametrize("size", [3, 4, 5, 9])
def test_indexes_are_joined_in_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(tree, "FEW", 2)
    folder = save(CheckpointStore(tmp_path), 1, [pieces_of(rank, size) for rank in range(size)])
    assert [path.name for path in folder.glob("index*")] == ["index.json"]
    assert list_checkpoints(tmp_path).rejected == ()
    reader = CheckpointReader(folder)
    assert reader.verify() == []
    for kind, name, whole in (
        ("weights", "rows", ROWS[: 2 * size]),
        ("optimizer", "rows/moment", ROWS[: 2 * size] * 2),
        ("weights", "flat", FLAT),
    ):
        assert bits(reader.read(kind, name)) == bits(whole)
    runs = json.loads((folder / "index.json").read_text())["weights"]["rows"]["runs"]
    assert [run["count"] for run in runs] == [size]


def test_an_index_grows_with_the_model_and_not_with_the_ranks(tmp_path: Path) -> None:
    def num_bytes(size: int) -> int:
        ranks = [
            [piece("rows", ROWS, Box((40 // size * r, 0), (40 // size, 3)))] for r in range(size)
        ]
        folder = save(CheckpointStore(tmp_path / str(size)), 1, ranks)
        return (folder / "index.json").stat().st_size

    assert num_bytes(40) - num_bytes(20) < 5


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_index_is_named(folder: Path, damage: str) -> None:
    path = folder / "index.json"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(raw if damage == "flip" else raw[:-1])
    reader = CheckpointReader(folder)
    with pytest.raises(CheckpointDamaged, match=r"index\.json"):
        reader.names("weights")
    (problem,) = CheckpointReader(folder).verify()
    assert "index.json" in problem
    if damage != "flip":
        (rejected,) = list_checkpoints(folder.parent).rejected
        assert "index.json" in rejected.reason


def test_an_index_that_leaves_a_piece_out_is_damage(folder: Path) -> None:
    reader = CheckpointReader(folder)
    known = reader._lookup.tensors("weights")["rows"]
    known.runs[:] = [type(known.runs[0])(0, known.runs[0].region)]
    with pytest.raises(CheckpointDamaged, match="not stored"):
        reader.read("weights", "rows")


def test_a_rank_that_cannot_read_what_others_wrote_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error", "a shard")

    monkeypatch.setattr(tree, "index_of", refuse)
    store = CheckpointStore(tmp_path)
    results = on_ranks(
        SIZE,
        lambda session: store.save(1, FakeEngine(pieces_of(session.world.rank)), session, {}),
    )
    assert all(isinstance(result, SaveFailed) for result in results)
    assert "rank 0: " in str(results[5])
    assert os.listdir(tmp_path) == []
    shutil.rmtree(tmp_path)
