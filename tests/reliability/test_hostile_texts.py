"""Messages have a bounded length, whatever a checkpoint contains, and reading it takes bounded
time.
"""

from __future__ import annotations

import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from drivetrain.checkpoint import CheckpointReader, list_checkpoints
from drivetrain.checkpoint.manifest import FileEntry, Manifest, write_manifest
from drivetrain.checkpoint.storage import fsspec_storage
from drivetrain.checkpoint.storage.protocol import ENTRY_POINT_GROUP
from drivetrain.checkpoint.writer import write_pieces
from drivetrain.cli.app import app
from drivetrain.kernel.errors import StorageUnavailable
from drivetrain.kernel.paths import Url
from drivetrain.kernel.shards import Piece
from drivetrain.run.quoted import say

MOST = 10_000
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def checkpoint(root: Path, files: list[FileEntry], step: int = 2) -> Path:
    folder = root / "checkpoints" / f"checkpoint-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, Manifest(step, tuple(files), {"step": step}, {}, "cpu", 1, ()))
    return folder


def missing(count: int) -> list[FileEntry]:
    return [
        FileEntry(f"weights-{number:05}-of-{count:05}.safetensors", 8, 0) for number in range(count)
    ]


def printed(*words: object) -> str:
    return CliRunner().invoke(app, [*map(str, words)]).output


def test_many_missing_files_are_reported_in_few_words(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, missing(5000))
    problems = CheckpointReader(folder).verify()
    assert len(problems) < 50
    assert "4980 more" in problems[-1]
    for path in (tmp_path, folder):
        for command in ("verify", "inspect"):
            text = printed("checkpoint", command, path)
            assert 0 < len(text) < MOST and "weights-00000" in text


def test_many_damaged_checkpoints_are_reported_in_few_words(tmp_path: Path) -> None:
    for step in range(1, 201):
        checkpoint(tmp_path, missing(1), step)
    text = printed("checkpoint", "verify", tmp_path)
    assert "150 more problems" in text and len(text) < 5 * MOST
    assert len(printed("checkpoint", "inspect", tmp_path)) < 5 * MOST
    assert len(list_checkpoints(tmp_path / "checkpoints").rejected) == 200


def test_what_is_said_is_not_longer_than_somebody_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("a" * 5_000_000 + "the end", label="error:")
    text = capsys.readouterr().err
    assert len(text) < 21_000 and text.endswith("the end\n") and "characters left out" in text


def verified(root: Path, count: int) -> float:
    """Return the CPU seconds that verifying this many empty tensors takes."""
    folder = root / f"{count}" / "checkpoint-000002"
    folder.mkdir(parents=True)
    pieces = [Piece("weights", f"w{number}", torch.empty(0), (0,)) for number in range(count)]
    files = write_pieces(folder, pieces, 0, 1)
    write_manifest(folder, Manifest(2, tuple(files), {"step": 2}, {}, "cpu", 1, ()))
    start = time.process_time()
    assert CheckpointReader(folder).verify() == []
    return time.process_time() - start


@pytest.mark.slow
def test_verifying_many_empty_tensors_takes_linear_time(tmp_path: Path) -> None:
    few, many = verified(tmp_path, 20_000), verified(tmp_path, 390_000)
    assert many < 40 * few
    assert many < 20


def test_headers_are_read_once_to_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.checkpoint import reader
    from drivetrain.checkpoint.index import piece_locator

    opened: list[Path] = []

    class Counting(reader.TensorFile):
        def __init__(self, path: Any, size: int | None = None) -> None:
            opened.append(path)
            super().__init__(path, size)

    for module in (reader, piece_locator):
        monkeypatch.setattr(module, "TensorFile", Counting)
    verified(tmp_path, 3)
    assert len(opened) == 1


def test_the_entry_point_group_is_named_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.checkpoint.storage import protocol

    asked: list[str] = []
    monkeypatch.setattr(protocol, "entry_points", lambda group, name: asked.append(group) or ())
    protocol._remote.cache_clear()
    with pytest.raises(StorageUnavailable) as raised:
        protocol.storage_of(Url("nosuchscheme://a/b"))
    assert asked == [ENTRY_POINT_GROUP] and ENTRY_POINT_GROUP in str(raised.value)
    assert f"entry-point group `{ENTRY_POINT_GROUP}`" in PAGE.read_text()
    assert "drivetrain.checkpoint.storage`" not in PAGE.read_text()
    assert EntryPoint("a", "b", ENTRY_POINT_GROUP).group == fsspec_storage.ENTRY_POINT_GROUP
