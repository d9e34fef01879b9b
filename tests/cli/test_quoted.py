"""Texts of strangers reach the terminal as text, and cannot control it."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path

import pytest
from command_line import Drive
from rich.console import Console

from drivetrain.checkpoint import MANIFEST, Manifest
from drivetrain.checkpoint.manifest import FileEntry, write_manifest
from drivetrain.cli.report.checkpoints import inspect, show
from drivetrain.kernel.errors import CheckpointDamaged, DataError, printable
from drivetrain.run.quoted import quoted, say

STEERS = "\x1b[2J\x1b]0;mine\x07[/b][red]\u202e\ud800\r\x9b31m"
SAFE = r"\x1b[2J\x1b]0;mine\x07[/b][red]\u202e\ud800\r\x9b31m"


def checkpoint(folder: Path, name: str, driver: str = "cpu") -> Path:
    folder.mkdir(parents=True)
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    raw = len(header).to_bytes(8, "little") + header + bytes(8)
    file = FileEntry("weights-00000-of-00001.safetensors", len(raw), zlib.crc32(raw))
    (folder / file.name).write_bytes(raw)
    tied = ((name, f"{name}2"),)
    write_manifest(folder, Manifest(6, (file,), {"step": 6}, driver=driver, tied=tied))
    return folder


def test_text_is_shown_as_python_writes_it() -> None:
    assert printable(STEERS) == SAFE == printable(SAFE)
    assert printable("Größe, 数\n\tfarther") == "Größe, 数\n\tfarther"
    assert str(DataError(STEERS)) == SAFE and str(quoted(STEERS)) == SAFE
    assert str(CheckpointDamaged("one", STEERS)).isprintable()


def test_names_and_folders_do_not_steer_the_terminal(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run[/b]\x1b[2J", STEERS, STEERS)
    file = io.StringIO()
    show(inspect(folder), Console(file=file, width=400, force_terminal=True, color_system=None))
    text = file.getvalue()
    assert text.count(SAFE) == 4 and r"run[/b]\x1b[2J" in text
    assert text.replace("\n", "").isprintable() and text.encode()


def test_nor_in_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(STEERS, label="error:")
    assert SAFE in capsys.readouterr().err
    with pytest.raises(CheckpointDamaged) as raised:
        inspect(checkpoint_of_another_sum(tmp_path / "run\x1b[2J[/]"))
    assert "is not as it was written" in str(raised.value) and str(raised.value).isprintable()


def checkpoint_of_another_sum(folder: Path) -> Path:
    checkpoint(folder, "w")
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"cpu"', b'"cpv"'))
    return folder


def test_the_commands(drive: Drive, tmp_path: Path) -> None:
    name = STEERS.replace("\ud800", "")  # half a character is no text: no file has it
    checkpoint(tmp_path / "run[/b]/checkpoints/checkpoint-000006", name)
    ran = drive("checkpoint", "inspect", "run[/b]")
    assert ran.code == 0 and "\x1b" not in ran.stdout and "run[/b]" in ran.stdout
    record = json.loads(drive("checkpoint", "inspect", "run[/b]", "--json").stdout)
    assert list(record["tensors"]["weights"]) == [name]
    assert drive("checkpoint", "verify", "run[/b]").code == 0
    altered = checkpoint_of_another_sum(tmp_path / "altered/checkpoint-000006")
    assert "is not as it was written" in drive("checkpoint", "inspect", str(altered)).stderr
    for path, said in (
        (altered, "not as it was written"),
        (renamed(tmp_path), "of step 6, and its folder is named for step 7"),
    ):
        ran = drive("checkpoint", "verify", str(path))
        assert ran.code == 1 and said in ran.stderr


def renamed(folder: Path) -> Path:
    """Write a checkpoint of step 6 into a folder named for step 7."""
    return checkpoint(folder / "checkpoint-000007", "w")
