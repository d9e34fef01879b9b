"""A save may be killed at any moment: before, within or after any call to the operating system."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import CheckpointReader, CheckpointStore, list_checkpoints, newest

from .fakes import FakeEngine, FakeSession, contents, piece, run_of, save

CALLS = ["open", "write", "fsync", "mkdir", "link", "rename", "unlink", "rmdir"]


class Died(BaseException):
    """Raised where the process dies: nothing after it happens."""


class Mortal:
    """Lets all calls of this process to the operating system fail, from the n-th on."""

    def __init__(self, patch: pytest.MonkeyPatch, lives: int, *, late: bool) -> None:
        self.lives, self.late, self.log = lives, late, []
        for name in CALLS:
            patch.setattr(os, name, self.mortal(name, getattr(os, name)))

    def mortal(self, name, real):
        def call(*args, **kwargs):
            self.log.append((name, *args))
            self.lives -= 1
            if self.lives > 0:
                return real(*args, **kwargs)
            if self.lives == 0 and self.late:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                else:
                    real(*args, **kwargs)
            raise Died

        return call


@pytest.mark.few(4)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", ["first", "retire", "replace", "left"])
def test_death_at_every_call(tmp_path, monkeypatch, case, late):
    """Die in each call. With `late`, the last call is still made: half of it for a write."""
    step = 1 if case == "replace" else 2
    expected = contents(save(CheckpointStore(tmp_path / "expected"), step, run_of(2.0, size=1)))
    survived, lives = False, 0
    while not survived:
        lives += 1
        root = tmp_path / str(lives)
        store = CheckpointStore(root, keep_last=1 if case == "retire" else None)
        old = None if case == "first" else contents(save(store, 1, run_of(1.0)))
        if case == "left":
            (root / "checkpoint-000001").rename(root / ".checkpoint-000001.replaced")
            (root / ".checkpoint-000002.writing").mkdir()
            (root / ".checkpoint-000002.writing" / "weights-00000-of-00001.safetensors").touch()
        with monkeypatch.context() as patch:
            Mortal(patch, lives, late=late)
            try:
                save(store, step, run_of(2.0, size=1))
                store.wait()
                survived = True
            except Died:
                pass
        found = newest(root)
        assert (contents(found) if found else None) in (old, expected)
        again = save(store, step, run_of(2.0, size=1))
        store.wait()
        assert contents(again) == expected
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert contents(newest(root)) == expected
    assert lives > 10


def test_all_is_synced_before_the_commit(tmp_path, monkeypatch):
    """Require a sync of all that is renamed, and then of the rename itself, since power may fail,
    too.
    """
    names = {}
    with monkeypatch.context() as patch:
        mortal = Mortal(patch, 10**6, late=False)
        opened = os.open

        def remember(path, *args, **kwargs):
            fd = opened(path, *args, **kwargs)
            names[fd] = Path(path).name
            mortal.log.append(("opened", fd, names[fd]))
            return fd

        patch.setattr(os, "open", remember)
        save(CheckpointStore(tmp_path), 1, run_of(1.0, size=1))
    events, current = [], {}
    for name, *args in mortal.log:
        if name == "opened":
            current[args[0]] = args[1]
        if name in ("write", "fsync"):
            events.append((name, current[args[0]]))
        if name == "rename":
            events.append((name, Path(args[1]).name))
    commit = events.index(("rename", "checkpoint-000001"))
    written = {file for name, file in events if name == "write"}
    assert len(written) == 4
    for file in written:
        last_write = max(i for i, event in enumerate(events) if event == ("write", file))
        assert last_write < events.index(("fsync", file)) < commit
    assert events[commit - 1] == ("fsync", ".checkpoint-000001.writing")
    assert events[commit + 1] == ("fsync", tmp_path.name)
    assert events[commit - 2] == ("fsync", "manifest.json")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("base", [1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_death_while_frozen_weights_are_shared(tmp_path, monkeypatch, base, late):
    """Die in the third save. It links to a file of the first checkpoint, which is removed then, or
    writes changed weights.
    """

    def saved(store: CheckpointStore, step: int) -> Path:
        frozen = torch.full((9,), base if step > 2 else 1.0)
        pieces = [piece("base", frozen), piece("head", torch.full((3,), float(step)))]
        path = save(store, step, [pieces], frozen={"base"})
        store.wait()
        return path

    before = [contents(saved(CheckpointStore(tmp_path / "before"), step)) for step in (1, 2)]
    expected = contents(saved(CheckpointStore(tmp_path / "expected"), 3))
    survived, lives = False, 0
    while not survived:
        lives += 1
        root = shutil.copytree(tmp_path / "before", tmp_path / str(lives))
        store = CheckpointStore(root, keep_last=2)
        with monkeypatch.context() as patch:
            mortal = Mortal(patch, lives, late=late)
            try:
                saved(store, 3)
                survived = True
            except Died:
                pass
        complete = [contents(found.folder) for found in list_checkpoints(root).complete]
        assert complete in (before, [*before, expected], [before[1], expected])
        saved(store, 3)
        complete = [contents(found.folder) for found in list_checkpoints(root).complete]
        assert complete == [before[1], expected]
    assert ("link" in [name for name, *_ in mortal.log]) == (base == 1.0)
    assert lives > 10


def save_for_ever(root: str, started) -> None:
    store, session = CheckpointStore(root, keep_last=2), FakeSession()
    for step in range(10**6):
        tensor = torch.full((300_000,), float(step))
        engine = FakeEngine([piece("w", tensor), piece("w/m", tensor + 1, None, "optimizer")])
        store.save(step, engine, session, {"step": step})
        started.set()


def test_kill_9(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "hypothesis", "drivetrain.checkpoint"])
    chance = random.Random(0)
    for _ in range(6):
        started = context.Event()
        process = context.Process(target=save_for_ever, args=(str(tmp_path), started))
        process.start()
        assert started.wait(60)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        process.join()
        reader = CheckpointReader(newest(tmp_path))
        assert reader.verify() == []
        step = float(reader.manifest.state["step"])
        assert torch.equal(reader.read("weights", "w"), torch.full((300_000,), step))
        assert torch.equal(reader.read("optimizer", "w/m"), torch.full((300_000,), step + 1))
