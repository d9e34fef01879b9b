"""Saving in the background: training continues, and the saved state is that of one step."""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer.problems import everything, recipe

from drivetrain import CheckpointSettings, Settings
from drivetrain.checkpoint import list_checkpoints, store
from drivetrain.checkpoint.buffers import HostCopies
from drivetrain.kernel.errors import SaveFailed
from drivetrain.kernel.events import Event, Saved, StepEnded
from drivetrain.kernel.shards import Piece
from drivetrain.trainer.fit import fit

SETTINGS = Settings(
    steps=9,
    global_batch=8,
    log_every=5,
    checkpoint=CheckpointSettings(every=3, keep_last=9, background=True),
)


def run(out: Path, settings: Settings = SETTINGS, *observers: Any) -> list[Event]:
    events: list[Event] = []
    fit(
        recipe(dropout=0.2), settings, backend="cpu", out=out, observers=[events.append, *observers]
    )
    return events


def test_training_goes_on_and_the_state_of_the_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps_later, write = threading.Event(), store.write_pieces

    def slow(*arguments: Any) -> Any:
        assert two_steps_later.wait(60)
        return write(*arguments)

    def at_step_5(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == 5:
            two_steps_later.set()

    monkeypatch.setattr(store, "write_pieces", slow)
    events = run(tmp_path / "background", SETTINGS, at_step_5)
    reported = [(type(e), e.step) for e in events if isinstance(e, StepEnded | Saved)]
    assert reported.index((StepEnded, 5)) < reported.index((Saved, 3))
    saved = [step for kind, step in reported if kind is Saved]
    assert saved == [3, 6, 9]
    monkeypatch.undo()
    at_once = dataclasses.replace(SETTINGS.checkpoint, background=False)
    run(tmp_path / "plain", dataclasses.replace(SETTINGS, checkpoint=at_once))
    for step in saved:
        name = f"checkpoints/checkpoint-{step:06}"
        background, plain = (everything(tmp_path / way / name) for way in ("background", "plain"))
        assert background.keys() == plain.keys()
        assert not [key for key in plain if not torch.equal(background[key], plain[key])]


def test_each_save_waits_for_the_one_before(tmp_path: Path) -> None:
    each = dataclasses.replace(SETTINGS.checkpoint, every=1)
    events = run(tmp_path, dataclasses.replace(SETTINGS, checkpoint=each))
    saved = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saved] == list(range(1, 10))
    assert [f.step for f in list_checkpoints(tmp_path / "checkpoints").complete] == [*range(1, 10)]
    assert len({event.buffer_bytes for event in saved}) == 1, "the copy's memory was not used again"


def test_no_save_begins_while_old_checkpoints_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, write = store.catalog.sweep, store.write_pieces

    def on_main_thread() -> bool:
        return threading.current_thread() is threading.main_thread()

    def sweep_late(root: Path) -> None:
        time.sleep(0.0 if on_main_thread() else 0.2)
        sweep(root)

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.5 if on_main_thread() else 0.0)
        return write(*arguments)

    monkeypatch.setattr(store.catalog, "sweep", sweep_late)
    monkeypatch.setattr(store, "write_pieces", write_slowly)
    at_end = dataclasses.replace(SETTINGS.checkpoint, every=8)  # and the ninth while all stands
    events = run(tmp_path, dataclasses.replace(SETTINGS, checkpoint=at_end))
    saved = [event for event in events if isinstance(event, Saved)]
    assert [(event.step, event.error) for event in saved] == [(8, ""), (9, "")]


def test_a_failed_write_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write_pieces

    def broken(folder: Path, *arguments: Any) -> Any:
        if "000003" in folder.name:
            raise OSError(errno.EIO, "the disk gave up", str(folder))
        return write(folder, *arguments)

    monkeypatch.setattr(store, "write_pieces", broken)
    saved = [event for event in run(tmp_path / "on") if isinstance(event, Saved)]
    assert [event.step for event in saved if not event.error] == [6, 9]
    assert "the disk gave up" in saved[0].error
    assert [f.step for f in list_checkpoints(tmp_path / "on" / "checkpoints").complete] == [6, 9]
    strict = dataclasses.replace(SETTINGS.checkpoint, stop_on_error=True)
    with pytest.raises(SaveFailed, match="the disk gave up"):
        run(tmp_path / "strict", dataclasses.replace(SETTINGS, checkpoint=strict))


def test_copies_are_made_in_the_same_place() -> None:
    copies = HostCopies()

    def copy(*tensors: Tensor) -> list[Tensor]:
        pieces = [Piece("weights", "w", tensor, tuple(tensor.shape)) for tensor in tensors]
        return [piece.tensor for piece in copies.of(pieces)]

    first = torch.arange(6.0).view(2, 3)
    kept = copy(first, torch.tensor(True), torch.zeros(0, 4))
    first.zero_()
    assert torch.equal(kept[0], torch.arange(6.0).view(2, 3))
    assert kept[1].dtype == torch.bool and kept[2].shape == (0, 4)
    again = copy(torch.ones(6, dtype=torch.float16), torch.tensor(False))
    assert again[0].data_ptr() == kept[0].data_ptr()
    assert again[0].dtype == torch.float16 and bool((again[0] == 1).all())
    assert copies.num_bytes == 24 + 1
    copy(torch.ones(100))
    assert copies.num_bytes == 400 + 1


def test_memory_for_the_first_copy_is_made_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, place = list[tuple[str, int]](), HostCopies._place

    def noted(copies: HostCopies, number: int, size: int) -> Tensor:
        before = copies.num_bytes
        tensor = place(copies, number, size)
        made.append((threading.current_thread().name, copies.num_bytes - before))
        return tensor

    monkeypatch.setattr(HostCopies, "_place", noted)
    saved = [event for event in run(tmp_path) if isinstance(event, Saved)]
    by_thread = {name: sum(size for who, size in made if who == name) for name, _ in made}
    assert by_thread.pop("MainThread") == 0
    assert sum(by_thread.values()) == saved[0].buffer_bytes > 0


def test_no_background_write_outlives_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, at_end = store.write_pieces, list[str]()

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)  # the failure comes before
        written = write(*arguments)
        at_end.append("written")
        return written

    def fail(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == 4:
            raise RuntimeError("an observer's")

    monkeypatch.setattr(store, "write_pieces", slow)
    with pytest.raises(RuntimeError, match="an observer's"):
        run(tmp_path, SETTINGS, fail)
    assert at_end == ["written"]
