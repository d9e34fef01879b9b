"""Saving to storage without renames: the manifest is the commit, whenever the process dies."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from drivetrain.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    export_weights,
    import_weights,
    list_checkpoints,
    newest,
    storage_of,
)
from drivetrain.checkpoint.storage import fsspec_storage
from drivetrain.checkpoint.storage.retry import Patience
from drivetrain.kernel.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    OutputError,
    SaveFailed,
    SettingError,
    StorageFailed,
    StorageUnavailable,
)
from drivetrain.kernel.paths import Url, place
from drivetrain.kernel.shards import Box
from drivetrain.trainer.resume import find_checkpoint

from .fakes import contents, on_ranks, piece, region_of, run_of, save

ROOT = Url("frail://bucket/run/checkpoints")


class Died(BaseException):
    """Raised where the process dies: nothing after it happens."""


class Frail(MemoryFileSystem):
    """An object store whose n-th request, and some or all of the later ones, fail."""

    protocol = "frail"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    lives = 10**9
    late = False
    failures: ClassVar[dict[str, list[Exception]]] = {}
    log: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("frail://", "memory://"))

    @classmethod
    def request(cls, kind: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        cls.log.append(kind)
        if cls.failures.get(kind):
            raise cls.failures[kind].pop(0)
        if kind in ("write", "copy", "delete"):
            cls.lives -= 1
            if cls.lives == 0 and cls.late:
                real(*args, **kwargs)
            if cls.lives <= 0:
                raise Died
        return real(*args, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        if mode == "wb":  # an object appears when its upload ends
            self.store.pop(self._strip_protocol(path), None)
            file.discard = lambda: vars(file).pop("close")

            def close() -> None:
                file.discard()
                self.request("write", file.commit)

            file.close = close
        return file

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.request("copy", super().cp_file, path1, path2, **kwargs)

    def rm_file(self, path: str) -> None:
        self.request("delete", super().rm_file, path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self.request("list", super().ls, path, detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.request("info", super().info, path, **kwargs)

    def cat_ranges(self, *args: Any, **kwargs: Any) -> Any:
        return self.request("read", super().cat_ranges, *args, **kwargs)


@pytest.fixture(autouse=True)
def frail(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Frail]]:
    fsspec.register_implementation("frail", Frail, clobber=True)
    Frail.store.clear()
    Frail.failures.clear()
    Frail.lives, Frail.late = 10**9, False
    quick = Patience(tries=3, first_pause=0.0)
    monkeypatch.setattr(storage_of(ROOT), "patience", quick)
    monkeypatch.setattr(fsspec_storage, "_FLAT", {"frail"})
    yield Frail
    Frail.lives = 10**9


def objects() -> list[str]:
    prefix = "/bucket/run/checkpoints/"
    return sorted(key.removeprefix(prefix) for key in Frail.store)


def folders() -> list[str]:
    return sorted({key.partition("/")[0] for key in objects()})


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", ["first", "retire", "replace", "left"])
def test_death_at_every_request(frail: type[Frail], case: str, late: bool) -> None:
    """Die in each request. With `late`, the last request is still carried out."""
    step = 1 if case == "replace" else 2
    expected = contents(save(CheckpointStore(ROOT.parent / "expected"), step, run_of(2.0, size=1)))
    survived, lives = False, 0
    while not survived:
        lives += 1
        frail.store.clear()
        store = CheckpointStore(ROOT, keep_last=1 if case == "retire" else None)
        old = None if case == "first" else contents(save(store, 1, run_of(1.0)))
        if case == "left":  # of a save and of a copy that were cut off
            for name in ("checkpoint-000002", ".checkpoint-000001.replaced"):
                part = ROOT / name / "weights-00000-of-00001.safetensors"
                storage_of(ROOT).create(part, lambda: [memoryview(b"part")])
        frail.lives, frail.late = lives, late
        try:
            save(store, step, run_of(2.0, size=1))
            store.wait()
            survived = True
        except Died:
            pass
        frail.lives = 10**9
        found = newest(ROOT)
        assert (contents(found) if found else None) in (old, expected)
        again = save(store, step, run_of(2.0, size=1))
        store.wait()
        assert contents(again) == expected
        complete = {found.folder.name for found in list_checkpoints(ROOT).complete}
        assert set(folders()) == complete, f"left lying: {sorted(Frail.store)}"
    assert lives > 4


def test_the_manifest_is_written_last_and_deleted_first(frail: type[Frail]) -> None:
    store = CheckpointStore(ROOT, keep_last=1)
    seen: list[tuple[str, list[str]]] = []
    real = frail.request.__func__  # type: ignore[attr-defined]

    def watch(kind: str, *args: Any, **kwargs: Any) -> Any:
        result = real(frail, kind, *args, **kwargs)
        if kind in ("write", "delete"):
            seen.append((kind, objects()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frail, "request", staticmethod(watch))
        save(store, 1, run_of(1.0))
        save(store, 2, run_of(1.0))
        store.wait()
    for kind, there in seen:
        for name in {key.partition("/")[0] for key in there}:
            files = [key for key in there if key.startswith(name)]
            assert f"{name}/manifest.json" not in files or len(files) == 7, kind
    assert folders() == ["checkpoint-000002"]


def test_what_is_not_ours_is_never_deleted() -> None:
    """Keep a folder without a manifest: another library may number its folders in the same way."""
    theirs = ROOT / "checkpoint-000001" / "model.safetensors"
    storage_of(ROOT).create(theirs, lambda: [memoryview(b"precious")])
    save(CheckpointStore(ROOT, keep_last=1), 2, run_of(1.0))
    assert "checkpoint-000001/model.safetensors" in objects()
    assert newest(ROOT) == ROOT / "checkpoint-000002"


@pytest.mark.parametrize("kind", ["write", "list", "info", "read", "copy", "delete"])
def test_what_fails_twice_is_done_the_third_time(frail: type[Frail], kind: str) -> None:
    store = CheckpointStore(ROOT, keep_last=2)
    for step in (1, 2, 2, 3):  # the second of step 2 is a replacement, which copies
        frail.failures[kind] = [ConnectionError("reset"), TimeoutError("late")]
        save(store, step, run_of(float(step)))
        store.wait()
    frail.failures[kind] = [ConnectionError("reset"), TimeoutError("late")]
    assert float(contents(newest(ROOT))["step"]) == 3
    assert folders() == ["checkpoint-000002", "checkpoint-000003"]
    assert kind in frail.log


def test_a_write_that_keeps_failing_names_rank_url_and_cause(frail: type[Frail]) -> None:
    store = CheckpointStore(ROOT)
    good = contents(save(store, 1, run_of(1.0)))
    for step in (1, 2):
        frail.failures["write"] = [ConnectionError("the cable is out")] * 100
        with pytest.raises(SaveFailed) as failed:
            save(store, step, run_of(2.0))
        frail.failures.clear()
        assert "rank 0: StorageFailed: frail://bucket/run/checkpoints/" in str(failed.value)
        assert "tried 3 times" in str(failed.value)
        assert "ConnectionError: the cable is out" in str(failed.value)
        assert contents(newest(ROOT)) == good
        assert folders() == ["checkpoint-000001"]


def test_what_is_refused_is_not_asked_for_again(frail: type[Frail]) -> None:
    frail.failures["write"] = [PermissionError(errno.EACCES, "no")] * 100
    with pytest.raises(OutputError, match="frail://bucket/run/checkpoints: nothing can be saved"):
        storage_of(ROOT).check(ROOT)
    assert len(frail.failures["write"]) == 99


def test_what_cannot_be_looked_at_is_not_taken_for_absent(frail: type[Frail]) -> None:
    """Require an error on all ranks. Resuming from an older checkpoint, or starting over, would
    lose the unreadable one.
    """
    store = CheckpointStore(ROOT)
    for step in (1, 2):
        save(store, step, run_of(1.0))
    for kind in ("list", "info", "read"):
        frail.failures[kind] = [ConnectionError("no route")] * 100
        for reported in on_ranks(2, lambda session: find_checkpoint(session, "auto", ROOT.parent)):
            assert isinstance(reported, StorageFailed), kind
            assert "ConnectionError: no route" in str(reported)
        frail.failures.clear()
    assert (
        on_ranks(2, lambda session: find_checkpoint(session, str(ROOT), None))
        == [ROOT / "checkpoint-000002"] * 2
    )


def test_a_file_that_is_missing_or_short_is_named_and_skipped(frail: type[Frail]) -> None:
    store = CheckpointStore(ROOT)
    for step in (1, 2):
        save(store, step, run_of(1.0))
    key = next(k for k in frail.store if "000002/weights-00001" in k)
    whole = frail.store[key].getvalue()
    frail.store[key].truncate(len(whole) - 4)
    assert newest(ROOT) == ROOT / "checkpoint-000001"
    (rejected,) = list_checkpoints(ROOT).rejected
    assert f"is {len(whole) - 4} bytes, and should be {len(whole)}" in rejected.reason
    del frail.store[key]
    (rejected,) = list_checkpoints(ROOT).rejected
    assert "weights-00001-of-00002.safetensors: no such file" in rejected.reason
    with pytest.raises(CheckpointDamaged, match="no such file"):
        CheckpointReader(rejected.folder).names("weights")
    with pytest.raises(CheckpointNotFound):
        CheckpointReader(ROOT / "checkpoint-000009")


def test_a_damaged_one_is_left_out_and_kept(frail: type[Frail]) -> None:
    store = CheckpointStore(ROOT)
    for step in (1, 2):
        save(store, step, run_of(1.0))
    key = next(k for k in frail.store if "000002/weights-00001" in k)
    frail.store[key].getbuffer()[-1] ^= 1
    reported: list[str] = []
    (found,) = on_ranks(
        1, lambda session: find_checkpoint(session, "auto", ROOT.parent, report=reported.append)
    )
    assert found == ROOT / "checkpoint-000001"
    assert "checkpoint-000002 is left out, and kept: " in reported[0] and "CRC-32" in reported[0]
    save(store, 2, run_of(2.0))
    assert folders() == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000002.damaged"]


def test_a_rank_reads_the_bytes_that_it_needs(frail: type[Frail]) -> None:
    tensor = torch.arange(4 << 20, dtype=torch.float32).view(1024, -1)
    reader = CheckpointReader(save(CheckpointStore(ROOT), 1, [[piece("w", tensor)]]))
    reader.names("weights")
    num_bytes = 0
    real = frail.cat_ranges

    def counted(self: Any, paths: Any, starts: Any, ends: Any, **kwargs: Any) -> Any:
        nonlocal num_bytes
        num_bytes += sum(ends) - sum(starts)
        return real(self, paths, starts, ends, **kwargs)

    region = Box((256, 0), (100, 4096))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frail, "cat_ranges", counted)
        read = reader.read("weights", "w", region)
    assert torch.equal(read, region_of(tensor, region))
    assert num_bytes == read.nbytes


def test_small_tensors_are_fetched_together(frail: type[Frail]) -> None:
    tensors = {f"t{i:03}": torch.full((100,), float(i)) for i in range(1000)}
    pieces = [piece(name, tensor) for name, tensor in tensors.items()]
    reader = CheckpointReader(save(CheckpointStore(ROOT), 1, [pieces]))
    frail.log.clear()
    for name, tensor in tensors.items():
        assert torch.equal(reader.read("weights", name), tensor)
    assert torch.equal(reader.read("weights", "t000"), tensors["t000"])
    assert frail.log.count("read") + frail.log.count("info") < 12


def test_weights_come_and_go(tmp_path: Path) -> None:
    path = save(CheckpointStore(ROOT), 5, run_of(1.0))
    folder = export_weights(path, tmp_path / "hub")
    start = import_weights(folder, ROOT.parent / "start")
    assert start == Url("frail://bucket/run/start/checkpoint-000000")
    ours, theirs = CheckpointReader(start), CheckpointReader(path)
    for name in theirs.names("weights"):
        assert torch.equal(ours.read("weights", name), theirs.read("weights", name))
    with pytest.raises(OutputError, match="exists"):
        import_weights(folder, ROOT.parent / "start")


def test_files_beside_are_for_folders() -> None:
    with pytest.raises(SaveFailed, match="can be saved to a folder only"):
        save(CheckpointStore(ROOT), 1, run_of(1.0), beside=lambda folder: None)
    assert objects() == []


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("s4://bucket/run", StorageUnavailable, "reaches s4://.*install s3fs"),
        ("memry://run", StorageUnavailable, "Did you mean memory://"),
        (Path("s3://bucket/run"), SettingError, "which loses a slash: give it as a str"),
        ("s3://bucket/run*", SettingError, "may not be in the URL"),
    ],
)
def test_what_cannot_be_a_place(name: Any, what: Any, message: str) -> None:
    with pytest.raises(what, match=message):
        storage_of(place(name))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageUnavailable, match=r"gs:// needs a package .*install gcsfs"):
        storage_of(place("gs://bucket/run"))


def test_paths_stay_paths(tmp_path: Path) -> None:
    odd = tmp_path / "c:" / "run"
    odd.mkdir(parents=True)
    for name in (odd, str(odd), "run", "c:/run", "//server/run"):
        assert place(name) == Path(name)
    assert place("S3://bucket/run/") == Url("S3://bucket/run")
    assert (ROOT / "a").parent == ROOT and ROOT.with_name("a").name == "a"
