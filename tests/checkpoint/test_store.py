"""A save is complete or absent, and exactly the promised checkpoints are kept."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    list_checkpoints,
    newest,
    save_folder,
)
from drivetrain.kernel.errors import SaveFailed, SettingError

from .fakes import (
    FakeEngine,
    bits,
    contents,
    on_ranks,
    piece,
    run_of,
    save,
)


def steps(root: Path) -> list[int]:
    return [found.step for found in list_checkpoints(root).complete]


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_lies_on_disk(tmp_path):
    path = save(CheckpointStore(tmp_path), 100, run_of(1.0), {"epoch": 2}, driver="some")
    assert path == tmp_path / "checkpoint-000100"
    assert entries(tmp_path) == ["checkpoint-000100"]
    assert entries(path) == [
        "manifest.json",
        *(f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("optimizer", "state", "weights")
          for rank in range(2)),
    ]  # fmt: skip
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format"], manifest["version"] == ("drivetrain-checkpoint", 1)
    assert (manifest["step"], manifest["state"]) == (100, {"epoch": 2})
    assert (manifest["driver"], manifest["world_size"]) == ("some", 2)
    reader = CheckpointReader(path)
    assert reader.names("weights") == ["flat", "rows", "whole"]
    assert reader.names("optimizer") == ["rows/moment"]
    assert reader.names("state") == ["rng/0/torch", "rng/1/torch"]
    assert reader.verify() == []


def test_a_step_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, run_of(1.0))
    path = save(store, 1, run_of(2.0, size=3))
    store.wait()
    assert entries(tmp_path) == [path.name]
    assert float(CheckpointReader(path).read("weights", "whole")[0, 0]) == 2.0


def test_files_beside_appear_with_the_checkpoint_or_not_at_all(tmp_path):
    store = CheckpointStore(tmp_path, digits=0)

    def beside(folder: Path) -> None:
        (folder / "notes").mkdir(exist_ok=True)
        (folder / "notes" / "card.md").write_text("a card")

    path = save(store, 5, run_of(1.0), beside=beside)
    assert path == tmp_path / "checkpoint-5"
    assert (path / "notes" / "card.md").read_text() == "a card"
    assert CheckpointReader(path).verify() == []

    def broken(folder: Path) -> None:
        beside(folder)
        raise ValueError("no card today")

    with pytest.raises(SaveFailed, match="no card today"):
        save(store, 6, run_of(1.0), beside=broken)
    assert entries(tmp_path) == ["checkpoint-5"]


def test_a_folder_that_all_ranks_fill(tmp_path):
    def fill(session, word):
        def write(folder: Path) -> None:
            if word == "bad" and session.world.rank == 1:
                raise ValueError("no room")
            (folder / f"{word}-{session.world.rank}").touch()

        return write

    target = tmp_path / "checkpoint-3"
    for word in ("first", "second"):
        on_ranks(2, lambda session, w=word: save_folder(target, session, fill(session, w)))
        assert entries(target) == [f"{word}-0", f"{word}-1"]
    failed = on_ranks(2, lambda session: save_folder(target, session, fill(session, "bad")))
    assert [type(result) for result in failed] == [SaveFailed] * 2
    assert "rank 1: ValueError: no room" in str(failed[0])
    assert entries(target) == ["second-0", "second-1"] and entries(tmp_path) == ["checkpoint-3"]


def test_a_failing_rank_fails_all_and_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    good = contents(save(store, 1, run_of(1.0)))
    ranks = run_of(2.0, size=3)
    ranks[1] = [piece("broken", torch.zeros(2, dtype=torch.complex128))]
    results = on_ranks(
        3, lambda session: store.save(2, FakeEngine(ranks[session.world.rank]), session, {})
    )
    assert [type(result) for result in results] == [SaveFailed] * 3
    for result in results:
        assert "rank 1: TypeError: 'broken' is torch.complex128" in str(result)
        assert "rank 0" not in str(result)
    assert entries(tmp_path) == ["checkpoint-000001"]
    assert contents(newest(tmp_path)) == good


def test_a_state_that_json_cannot_hold_fails_the_save(tmp_path):
    with pytest.raises(SaveFailed, match=r"\['loss'\] is a Tensor"):
        save(CheckpointStore(tmp_path), 1, run_of(1.0), {"loss": torch.tensor(1.0)})
    assert entries(tmp_path) == []


def test_a_state_that_could_not_be_read_back_fails_the_save(tmp_path):
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(SaveFailed, match="nested deeper"):
        save(CheckpointStore(tmp_path), 1, run_of(1.0), {"deep": deep})
    with pytest.raises(SettingError, match="step is -1"):
        save(CheckpointStore(tmp_path), -1, run_of(1.0))
    assert entries(tmp_path) == []


def test_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1, run_of(1.0))
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SaveFailed, match=r"\d+ bytes to write and 100 free"):
        save(store, 2, run_of(2.0))
    usage.free = 10_000
    save(store, 3, run_of(3.0))
    assert steps(tmp_path) == [1, 3]


FAILING = ["open", "write", "fsync", "mkdir", "rename"]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("call", FAILING)
def test_a_failing_call_is_reported_and_undone(tmp_path, monkeypatch, call, replaced):
    """Let the n-th such call fail, for every n, as on a full or failing disk."""
    store = CheckpointStore(tmp_path)
    old = contents(save(store, 1, run_of(1.0)))
    step, real, reports = (1 if replaced else 2), getattr(os, call), []
    calls = limit = 0

    def failing(path, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == limit:
            named = (str(path),) if call in ("open", "mkdir", "rename") else ()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named)
        return real(path, *args, **kwargs)

    while calls >= limit:
        calls, limit = 0, limit + 1
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                save(store, step, run_of(2.0, size=1))
                store.wait()
            except SaveFailed as error:
                reports.append(str(error))
                assert not list(tmp_path.glob(".*"))
        assert contents(newest(tmp_path)) in (old, contents_of_new(step))
    assert not list(tmp_path.glob(".*"))
    assert contents(newest(tmp_path)) == contents_of_new(step)
    assert reports
    for report in reports:
        assert "rank 0: OSError: [Errno 28] No space left on device" in report
        assert str(tmp_path) in report.partition("rank 0")[2]


def contents_of_new(step: int) -> dict:
    tensors = {
        f"{p.kind}:{p.name}": bits(p.tensor.reshape(p.shape)) for p in run_of(2.0, size=1)[0]
    }
    rng = {"state:rng/0/torch": bits(torch.zeros(16, dtype=torch.uint8))}
    return tensors | rng | {"state": {"step": step}, "step": step}


def test_an_old_checkpoint_that_cannot_go_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1, run_of(1.0))

    def refuse(path, **kwargs):
        raise PermissionError(errno.EACCES, "no", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        save(store, 2, run_of(2.0))
        store.wait()
    assert "could not be removed" in caplog.text
    assert steps(tmp_path) == [2]
    save(store, 3, run_of(3.0))
    store.wait()
    assert entries(tmp_path) == ["checkpoint-000003"]


def test_deleting_an_old_checkpoint_holds_nobody_up(tmp_path, monkeypatch):
    """Require that a checkpoint is off the list when the save returns, and deleted before the next
    save.
    """
    store, may_go, real = CheckpointStore(tmp_path, keep_last=1), threading.Event(), os.unlink

    def slow(path, **kwargs):
        assert may_go.wait(60)
        real(path, **kwargs)

    save(store, 1, run_of(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", slow)
        save(store, 2, run_of(2.0))
        assert steps(tmp_path) == [2]
        assert entries(tmp_path) == [".checkpoint-000001.removing", "checkpoint-000002"]
        may_go.set()
        save(store, 3, run_of(3.0))
        store.wait()
    assert entries(tmp_path) == ["checkpoint-000003"]


FORKED = """
import os, signal
from fakes import run_of, save
from drivetrain.checkpoint import CheckpointStore
store = CheckpointStore({root!r}, keep_last=1)
for step in (1, 2):
    save(store, step, run_of(1.0))
store.wait()
child = os.fork()
if not child:
    signal.alarm(60)  # which ends it, if it waits for a thread that it has not got
    for step in (3, 4):
        save(store, step, run_of(1.0))
    store.wait()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.listdir({root!r}))
"""


def test_a_fork_of_a_process_that_has_saved_can_save(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKED.format(root=str(tmp_path))],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "['checkpoint-000004']", done.stderr


def test_what_a_dead_run_left_is_cleared(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, run_of(1.0))
    (tmp_path / ".checkpoint-000002.writing").mkdir()
    (tmp_path / ".checkpoint-000002.writing" / "weights").touch()
    (tmp_path / ".checkpoint-000000.removing").symlink_to(tmp_path / "checkpoint-000001")
    (tmp_path / "checkpoint-000001").rename(tmp_path / ".checkpoint-000001.replaced")
    (tmp_path / "notes.txt").touch()
    listing = list_checkpoints(tmp_path)
    assert [found.step for found in listing.complete] == [1]
    assert sorted(item.reason for item in listing.rejected) == [
        "removing it was interrupted",
        "writing it was interrupted",
    ]
    save(store, 2, run_of(2.0))
    assert entries(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "notes.txt"]
    assert steps(tmp_path) == [1, 2]


def test_newest_skips_and_keeps_what_is_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    assert newest(tmp_path / "nowhere") is None
    for step in (1, 2, 3):
        save(store, step, run_of(float(step)))
    (tmp_path / "checkpoint-000003" / "manifest.json").unlink()
    os.symlink(tmp_path / "checkpoint-000002", tmp_path / "checkpoint-000009")
    shutil.copytree(tmp_path / "checkpoint-000002", tmp_path / "checkpoint-000008")
    assert newest(tmp_path) == tmp_path / "checkpoint-000002"
    reasons = {item.folder.name: item.reason for item in list_checkpoints(tmp_path).rejected}
    assert "never completed" in reasons["checkpoint-000003"]
    assert "is a link" in reasons["checkpoint-000009"]
    assert "of step 2" in reasons["checkpoint-000008"]
    for step in (4, 5):
        save(store, step, run_of(float(step)))
    assert steps(tmp_path) == [4, 5]
    assert (tmp_path / "checkpoint-000003").exists()


scores = st.one_of(st.none(), st.floats(), st.integers(-3, 3))


@given(
    scores=st.lists(scores, min_size=1, max_size=8),
    keep_last=st.none() | st.integers(1, 3),
    keep_best=st.integers(1, 2),
    best_mode=st.sampled_from(["min", "max"]),
    keep_every=st.none() | st.integers(1, 4),
)
@example([math.nan, 1.0, 0.5, 2.0, math.nan], 1, 1, "min", None)
@example([2, 2, None, True, -math.inf], 1, 2, "max", 4)
@settings(deadline=None, max_examples=40)
def test_retention(tmp_path_factory, scores, keep_last, keep_best, best_mode, keep_every):
    """Require after every save the last checkpoints, the best so far, every n-th, and no others."""
    store = CheckpointStore(
        tmp_path_factory.mktemp("run"),
        keep_last=keep_last,
        keep_best=keep_best,
        best_metric="loss",
        best_mode=best_mode,
        keep_every=keep_every,
    )
    here: dict[int, float | None] = {}
    for step, score in enumerate(scores, 1):
        here[step] = score
        metrics = {} if score is None else {"loss": score}
        save(store, step, [[]], {"metrics": metrics})
        sign = 1 if best_mode == "min" else -1
        real = [s for s in here if here[s] is not None and not math.isnan(here[s])]
        best = sorted(real, key=lambda s: (sign * here[s], s))[:keep_best]
        if keep_last is not None:
            every = [s for s in here if keep_every and s % keep_every == 0]
            here = {s: here[s] for s in sorted({*best, *every, *sorted(here)[-keep_last:]})}
        assert steps(store.root) == list(here)
        ranked = store.retention.best(list_checkpoints(store.root).complete)
        assert [found.step for found in ranked[: len(best)]] == best


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_best": -1}, {"best_mode": "least"}])
def test_retention_refuses_nonsense(tmp_path, wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        CheckpointStore(tmp_path, **wrong)
