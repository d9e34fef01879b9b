"""The benchmark of thousands of ranks plans as the library does: compared on few ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint.format.regions import result_shape
from drivetrain.checkpoint.index.entries import Index
from drivetrain.checkpoint.index.piece_locator import index_of
from drivetrain.checkpoint.manifest import FileEntry

TINY = {"layers": 2, "width": 48, "hidden": 100, "key_value_width": 20, "vocabulary": 70}


@pytest.fixture
def scale(benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = benchmark_module("scale")
    monkeypatch.setitem(module.MODELS, "tiny", module.Model(**TINY))
    monkeypatch.setattr(module, "SHARDS", 8)
    return module


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "zero2", "zero3"])
def test_the_index_by_rule_is_the_one_of_the_headers(
    scale: Any, layout: str, tmp_path: Path
) -> None:
    size = 32
    written = [
        each
        for rank in range(size)
        for each in scale.write_headers(tmp_path, "tiny", layout, size, rank)
    ]
    entries = sorted((FileEntry(*each[:3]) for each in written), key=lambda entry: entry.part)
    joined = index_of(tmp_path, entries, leave_out="rng/")
    assert _plain(joined) == _plain(scale.index_by_rule("tiny", layout, size, 0, size))


def _plain(index: Index) -> Any:
    """Return every single piece, since runs of two or three pieces may be grouped differently."""
    return {
        (kind, name): (known.info, sorted(_pieces(known)))
        for kind, tensors in index.kinds.items()
        for name, known in tensors.items()
    }


def _pieces(known: Any) -> list[Any]:
    found: list[Any] = []
    for run in known.runs:
        region = run.region
        flat = hasattr(region, "start")
        first = (region.start,) if flat else region.offsets
        size = (region.stop - region.start,) if flat else region.sizes
        by = run.by or (0,) * len(first)
        for number in range(run.count):
            offsets = tuple(o + number * step for o, step in zip(first, by, strict=True))
            whole = math.prod(size) == math.prod(known.info.shape)  # which is no part, if written
            found.append((run.part + number * run.every, *(() if whole else (offsets, size))))
    return found


@pytest.mark.parametrize(("writers", "readers"), [(40, 8), (24, 40), (8, 4)])
@pytest.mark.parametrize("layout", ["fsdp", "zero2"])
def test_a_crossing_is_planned_in_whole(
    scale: Any, layout: str, writers: int, readers: int, tmp_path: Path
) -> None:
    """Plan in this process: all tensors of the new world's ranks are found in headers."""
    folder = tmp_path / "run" / "checkpoint-000001"
    folder.mkdir(parents=True)
    ranks = [0, readers // 2, readers - 1]
    scale._write_files(folder, scale.Crossing("tiny", layout, writers, readers), ranks)
    scale.save(folder, "tiny", layout, writers)
    (folder.parent / "files.json").unlink()
    for rank in ranks:
        resumed = scale.resume(folder, "tiny", layout, readers, rank)
        regions = scale.held("tiny", layout, rank, readers)
        expected = sum(4 * math.prod(result_shape(each.region, each.shape)) for each in regions)
        assert resumed["planned_bytes"] == expected
