"""A checkpoint that differs from what was written is named, left out and kept; another one is
resumed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Settings
from drivetrain.checkpoint import MANIFEST, CheckpointReader, list_checkpoints
from drivetrain.checkpoint.storage import local
from drivetrain.kernel.errors import CheckpointDamaged, CheckpointNotFound, StorageFailed
from drivetrain.kernel.events import Resumed, Warned
from drivetrain.trainer.fit import fit

from .compat_runs import train_with_compat
from .runs import SETTINGS, Run, everything, journal, recipe, start, train

STEPS = 4
SHORT = replace(SETTINGS, steps=STEPS, checkpoint=replace(SETTINGS.checkpoint, keep_last=STEPS))
Damage = Callable[[Path], str]
"""Damages a checkpoint; returns text that the message must contain."""


def one(folder: Path, pattern: str) -> Path:
    return next(folder.glob(pattern))


def truncated(folder: Path) -> str:
    path = one(folder, "optimizer-*")
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.name}: is "


def empty(folder: Path) -> str:
    path = one(folder, "weights-*")
    path.write_bytes(b"")
    return f"{path.name}: is 0 bytes"


def missing(folder: Path) -> str:
    path = one(folder, "state-*")
    path.unlink()
    return f"{path.name}: cannot be opened"


def flipped(pattern: str, place: float) -> Damage:
    """Return a function that flips one bit of a file, at a relative place."""

    def flip(folder: Path) -> str:
        path = one(folder, pattern)
        raw = bytearray(path.read_bytes())
        raw[int(place * (len(raw) - 1))] ^= 1
        path.write_bytes(raw)
        return path.name

    flip.__name__ = f"flipped at {place} of {pattern}"
    return flip


def counted_otherwise(folder: Path) -> str:
    """Change the manifest to a well-formed one that was never written."""
    path = folder / MANIFEST
    text = path.read_text()
    assert '"samples": 32' in text
    path.write_text(text.replace('"samples": 32', '"samples": 33'))
    return f"{MANIFEST}: is not as it was written"


def truncated_manifest(folder: Path) -> str:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:-20])
    return MANIFEST


def is_a_folder(folder: Path) -> str:
    path = one(folder, "weights-*")
    path.unlink()
    path.mkdir()
    return f"{path.name}: not a regular file"


DAMAGES: list[Damage] = [
    truncated, empty, missing, is_a_folder, truncated_manifest, counted_otherwise,
    *(flipped(pattern, place)
      for pattern in ("weights-*", "optimizer-*", "state-*", MANIFEST)
      for place in (0, 0.3, 1)),
]  # fmt: skip


class Events(list[Any]):
    def __call__(self, event: Any) -> None:
        self.append(event)

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]


def resumed(out: Path, settings: Settings = SHORT, **changes: Any) -> Events:
    events = Events()
    given = {"backend": "cpu", "out": out, "resume": "auto", **changes}
    fit(recipe(), settings, observers=[events], **given)
    return events


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has a checkpoint for each of its steps."""
    out = tmp_path_factory.mktemp("sound")
    fit(recipe(), SHORT, backend="cpu", out=out)
    return out


@pytest.fixture
def out(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def last(out: Path) -> Path:
    return list_checkpoints(out / "checkpoints").complete[-1].folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.few(6)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_auto_takes_the_one_before_and_says_so(out: Path, sound: Path, damage: Damage) -> None:
    newest = last(out)
    named = damage(newest)
    before = contents(newest)
    (reported,) = resumed(out).of(Resumed)
    assert reported.step == STEPS - 1
    assert any("checkpoint-000004 is left out, and kept: " in note for note in reported.notes)
    assert any(named in note for note in reported.notes)
    assert contents(newest.with_name(f"{newest.name}.damaged")) == before
    mine, whole = everything(last(out)), everything(last(sound))
    assert all(torch.equal(mine[name], tensor) for name, tensor in whole.items())


def test_damaged_ones_outlive_what_is_saved_after_them(out: Path) -> None:
    for _ in range(2):
        flipped("weights-*", 1)(last(out))
        resumed(out, replace(SHORT, checkpoint=replace(SHORT.checkpoint, keep_last=2)))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "checkpoint-000003",
        "checkpoint-000004",
        "checkpoint-000004.damaged",
        "checkpoint-000004.damaged-2",
    ]


def test_if_all_are_damaged_nothing_starts_over(out: Path) -> None:
    for found in list_checkpoints(out / "checkpoints").complete:
        flipped("weights-*", 1)(found.folder)
    before = contents(out)
    with pytest.raises(CheckpointDamaged) as reported:
        resumed(out)
    for step in range(1, STEPS + 1):
        assert f"checkpoint-{step:06d}/weights-" in str(reported.value)
    assert "all are kept" in str(reported.value)
    assert contents(out) == before


def test_a_torn_one_is_named_and_no_reason_to_stop(out: Path) -> None:
    folder = last(out).parent
    for found in list_checkpoints(folder).complete:
        shutil.rmtree(found.folder)
    (folder / ".checkpoint-000001.writing").mkdir()
    events = resumed(out)
    assert not events.of(Resumed)
    assert [event.message for event in events.of(Warned)] == [
        ".checkpoint-000001.writing is left out, and kept: writing it was interrupted"
    ]


def test_one_that_is_asked_for_by_name_is_refused(out: Path, tmp_path: Path) -> None:
    newest = last(out)
    flipped("optimizer-*", 1)(newest)
    before = contents(newest)
    with pytest.raises(CheckpointDamaged, match=r"optimizer-00000.*CRC-32"):
        resumed(tmp_path / "other", resume=newest)
    assert contents(newest) == before
    (reported,) = resumed(tmp_path / "third", resume=out).of(Resumed)
    assert reported.step == STEPS - 1
    assert contents(newest) == before, "another run's is not renamed"
    unverified = replace(SHORT, checkpoint=replace(SHORT.checkpoint, verify=False))
    (reported,) = resumed(tmp_path / "fourth", unverified, resume=newest).of(Resumed)
    assert reported.step == STEPS


def test_damage_that_shows_too_late_is_said_to_have_mixed_the_model(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CheckpointReader.read
    weights: list[str] = []

    def torn(self: CheckpointReader, kind: Any, name: str, *rest: Any, **out: Any) -> Any:
        weights.extend([name] if kind == "weights" else [])
        if len(weights) == 2:
            raise CheckpointDamaged(f"{name!r} is cut off")
        return read(self, kind, name, *rest, **out)

    monkeypatch.setattr(CheckpointReader, "read", torn)
    unverified = replace(SHORT, checkpoint=replace(SHORT.checkpoint, verify=False))
    with pytest.raises(CheckpointDamaged, match=r"cut off\. .* a mixture, and must not be used"):
        resumed(tmp_path / "other", unverified, resume=last(out))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        resumed(tmp_path, resume=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed"])
def test_each_rank_looks_at_its_own_part(tmp_path: Path, backend: str) -> None:
    run = Run(backend, 2)
    for rank in start(run, tmp_path, 2, train):
        rank.join(240)
    newest = last(tmp_path)
    whole = everything(newest)
    flipped("*-00001-of-00002*", 1)(newest)
    ranks = start(run, tmp_path, 2, train)
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    reported = [line for line in journal(tmp_path) if "resumed" in line]
    assert reported[-1]["resumed"] == SETTINGS.steps - 1
    assert "-00001-of-00002.safetensors: CRC-32 is " in reported[-1]["notes"][0]
    again = everything(last(tmp_path))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_compat_takes_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_with_compat(Run(), tmp_path, {})
    newest = list_checkpoints(tmp_path).complete[-1].folder
    whole = everything(newest)
    flipped("optimizer-*", 1)(newest)
    before = contents(newest)
    with pytest.raises(ValueError, match=r"optimizer-00000.*CRC-32"):
        train_with_compat(Run(), tmp_path, {}, resume=str(newest))
    with caplog.at_level(logging.WARNING, "drivetrain"):
        train_with_compat(Run(), tmp_path, {})
    assert f"{newest} is left out, and kept: " in caplog.text
    assert contents(newest.with_name(f"{newest.name}.damaged")) == before
    assert [line["resumed"] for line in journal(tmp_path) if "resumed" in line] == [
        SETTINGS.steps - 1
    ]
    again = everything(list_checkpoints(tmp_path).complete[-1].folder)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


class Flaky:
    """Lets a number of reads of weights fail, or return a wrong byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, flips: bool = False) -> None:
        self.times, self.flips, self.read = times, flips, os.preadv
        monkeypatch.setattr(os, "preadv", self)
        monkeypatch.setattr(local, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        if not self.times or "weights" not in os.readlink(f"/proc/self/fd/{fd}"):
            return self.read(fd, buffers, offset)
        self.times -= 1
        if not self.flips:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = self.read(fd, buffers, offset)
        buffers[0][count - 1] ^= 1
        return count


@pytest.mark.parametrize("flips", [False, True])
def test_one_bad_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flips: bool
) -> None:
    fit(recipe(), SHORT, backend="cpu", out=tmp_path)
    Flaky(monkeypatch, 1, flips)
    (event,) = resumed(tmp_path).of(Resumed)
    assert event.step == STEPS and not event.notes
    assert not list((tmp_path / "checkpoints").glob("*.damaged"))


def test_a_disk_that_does_not_answer_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require that the checkpoint keeps its name, and that no older one is silently resumed."""
    fit(recipe(), SHORT, backend="cpu", out=tmp_path)
    Flaky(monkeypatch, 10**9)
    with pytest.raises(StorageFailed, match=r"weights.*cannot be read at byte .*tried 4 times"):
        resumed(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*.damaged"))
    monkeypatch.undo()
    assert resumed(tmp_path).of(Resumed)[0].step == STEPS
