"""Copies of a run's records at its URL: their cost, and what a killed run leaves there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from drivetrain.checkpoint.storage.fsspec_storage import FsspecStorage
from drivetrain.kernel.errors import StorageFailed
from drivetrain.kernel.paths import Url
from drivetrain.run.record_file import read_records
from drivetrain.run.run_folder_writer import RunFolderWriter

URL = Url("memory://copies/run")
STARTED = {"event": "run_started", "backend": "cpu", "world": {"size": 1}, "total_steps": None}
NUM_SAVES = 256


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = fsspec.filesystem("memory")
    if memory.exists("/copies"):
        memory.rm("/copies", recursive=True)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Record the bytes that are sent to the URL, by file."""
    counts: dict[str, int] = {}
    replace = FsspecStorage.replace

    def counting(storage: FsspecStorage, path: Url, raw: bytes) -> None:
        counts[path.name] = counts.get(path.name, 0) + len(raw)
        replace(storage, path, raw)

    monkeypatch.setattr(FsspecStorage, "replace", counting)
    return counts


def writer() -> RunFolderWriter:
    return RunFolderWriter(URL, {"name": "run"}, lambda started, reason: "")


def saved(step: int) -> dict[str, Any]:
    return {"event": "saved", "step": step, "path": "x" * 80, "seconds": 0.1, "error": ""}


def there() -> dict[str, bytes]:
    fs = fsspec.filesystem("memory")
    return {name.rpartition("/")[2]: fs.cat_file(name) for name in fs.ls("/copies/run", False)}


def joined() -> bytes:
    """Return the metrics at the URL, as `cat metrics.jsonl*` joins them."""
    return b"".join(raw for name, raw in sorted(there().items()) if name.startswith("metrics"))


def local() -> Path:
    return Path("runs/copies-run/metrics.jsonl")


def test_saves_send_new_records_and_a_killed_run_leaves_them_all(sent: dict[str, int]) -> None:
    run = writer()
    run.sink(STARTED)
    for step in range(NUM_SAVES):
        run.sink(saved(step))
        assert joined() == local().read_bytes()
        assert len(there()) < 12
    size = local().stat().st_size
    assert sum(sent.values()) < 10 * size
    assert sent["config.json"] == len(there()["config.json"])
    run.sink({"event": "run_ended", "step": NUM_SAVES, "reason": "finished", "seconds": 1.0})
    assert sorted(there()) == ["config.json", "metrics.jsonl", "report.html"]
    assert there()["metrics.jsonl"] == local().read_bytes()


def test_a_copy_that_fails_is_made_up_for_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageFailed("no answer")

    run = writer()
    run.sink(STARTED)
    for step in range(24):
        with monkeypatch.context() as patch:
            if step % 3 == 1:
                patch.setattr(FsspecStorage, "replace" if step % 2 else "remove", fail)
            run.sink(saved(step))
        if step % 3 == 0:
            assert joined() == local().read_bytes()


def test_a_run_resumed_elsewhere_keeps_the_records_of_the_killed_one() -> None:
    killed = writer()
    killed.sink(STARTED)
    for step in range(8):
        killed.sink(saved(step))
    assert len([name for name in there() if name.startswith("metrics")]) > 1
    before = joined()
    stale = fsspec.filesystem("memory")  # the kill came before a replaced part was removed
    stale.pipe_file(f"/copies/run/metrics.jsonl.{len(before) - 50:015d}", before[-50:])
    shutil.rmtree("runs")
    resumed = writer()
    resumed.sink(STARTED)
    resumed.sink(saved(8))
    assert local().read_bytes().startswith(before)
    assert joined() == there()["metrics.jsonl"] == local().read_bytes()
    assert [r["step"] for r in read_records(local()) if r["event"] == "saved"] == list(range(9))


def test_records_that_cannot_be_read_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.filesystem("memory").pipe_file("/copies/run/metrics.jsonl.000000000000009", b"{}\n")
    run = writer()
    run.sink(STARTED)
    run.sink(saved(1))
    assert "the part before it is missing" in capsys.readouterr().err
    assert sorted(there()) == ["config.json", "metrics.jsonl.000000000000009"]
    assert json.loads(local().read_text().splitlines()[-1])["step"] == 1
