"""A save that fails at any of its calls: the run continues with the checkpoint before, and reports
it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick

from drivetrain.checkpoint import CheckpointReader, list_checkpoints
from drivetrain.kernel.errors import EXIT_PREEMPTED, SaveFailed
from drivetrain.kernel.events import Resumed, Saved, StepEnded
from drivetrain.run.record_file import read_records
from drivetrain.run.run_folder import read_config
from drivetrain.trainer.fit import fit

from .dying import interposed
from .runs import SETTINGS, everything, recipe, start

STEPS = 3
SHORT = replace(SETTINGS, steps=STEPS, evaluate=replace(SETTINGS.evaluate, every=None))
IN_BACKGROUND = replace(SHORT, checkpoint=replace(SHORT.checkpoint, background=True))
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}


class Failing:
    """An act that lets `count` calls fail, from the `first`-th on."""

    def __init__(self, first: int, count: float, number: int) -> None:
        self.first, self.last, self.number = first, first + count, number
        self.calls = 0

    def __call__(self, name: str, do: Callable[..., Any]) -> None:
        self.calls += 1
        if self.first <= self.calls < self.last:
            if name == "write":
                do(half=True)  # a disk fills up in the middle of a write
            raise OSError(self.number, os.strerror(self.number))


def run(out: Path, failing: Failing, settings: Any) -> list[Any]:
    out.mkdir(exist_ok=True)
    events: list[Any] = []
    with interposed(out / "checkpoints", failing):
        fit(recipe(), settings, backend="cpu", out=out, observers=[events.append])
    return events


@dataclass
class Whole:
    """An uninterrupted run."""

    calls: dict[int, int]
    """Number of calls before the end of each step's save."""
    tensors: dict[str, torch.Tensor]

    @property
    def second(self) -> range:
        """The numbers of the second save's calls."""
        return range(self.calls[1] + 1, self.calls[2] + 1)

    def assert_same(self, out: Path) -> None:
        found = everything(out / "checkpoints" / f"checkpoint-{STEPS:06d}")
        assert all(torch.equal(found[name], tensor) for name, tensor in self.tensors.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out, calls = tmp_path_factory.mktemp("whole"), dict[int, int]()
    counting = Failing(10**9, 0, 0)

    def note(event: Any) -> None:
        if isinstance(event, Saved):
            calls[event.step] = counting.calls

    with interposed(out / "checkpoints", counting):
        fit(recipe(), SHORT, backend="cpu", out=out, observers=[note])
    return Whole(calls, everything(out / "checkpoints" / f"checkpoint-{STEPS:06d}"))


def sound(out: Path) -> list[int]:
    """Return the steps that have a checkpoint. All checkpoints must be as they were written."""
    listing = list_checkpoints(out / "checkpoints")
    for found in listing.complete:
        assert CheckpointReader(found.folder).verify() == []
    return [found.step for found in listing.complete]


@pytest.mark.few(2)
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [SHORT, IN_BACKGROUND], ids=["", "background"])
@pytest.mark.parametrize("error", ERRORS)
def test_each_call_fails_once(
    tmp_path: Path, whole: Whole, error: str, settings: Any, stride: int
) -> None:
    """Fail a call of the second step's save. The next save must succeed."""
    failed = 0
    # others for each: together they are nearly all
    start_at = (2 * list(ERRORS).index(error) + (settings is IN_BACKGROUND)) % stride
    for first in whole.second[start_at::stride]:
        out = tmp_path / str(first)
        events = run(out, Failing(first, 1, ERRORS[error]), settings)
        reported = [event for event in events if isinstance(event, Saved)]
        assert [event.step for event in reported] == [1, 2, 3]
        assert not reported[0].error and not reported[2].error
        if reported[1].error:
            failed += 1
            assert os.strerror(ERRORS[error]) in reported[1].error
            assert "checkpoints before it are untouched" in reported[1].error
        # if only the folder's sync failed, the checkpoint is there, but may not be durable
        assert sound(out) in ([[1, 3], [2, 3]] if reported[1].error else [[2, 3]])
        assert not [path for path in (out / "checkpoints").iterdir() if path.name[0] == "."]
        whole.assert_same(out)
    assert failed > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [SHORT, IN_BACKGROUND], ids=["", "background"])
def test_a_disk_that_stays_full(tmp_path: Path, whole: Whole, settings: Any) -> None:
    """Fail all writes from some call of the second save on. The run must end normally, and resume
    from the newest checkpoint when there is room again.
    """
    for first in whole.second[::8]:
        out = tmp_path / str(first)
        run(out, Failing(first, float("inf"), errno.ENOSPC), settings)
        before = sound(out)
        assert before[-1] in (1, 2)
        events: list[Any] = []
        fit(recipe(), settings, backend="cpu", out=out, resume="auto", observers=[events.append])
        (resumed,) = [event for event in events if isinstance(event, Resumed)]
        assert resumed.step == before[-1]
        whole.assert_same(out)


@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
def test_or_ends_with_stop_on_error(tmp_path: Path, whole: Whole, background: bool) -> None:
    strict = replace(SHORT.checkpoint, stop_on_error=True, background=background)
    settings = replace(SHORT, checkpoint=strict)
    with pytest.raises(SaveFailed, match=r"checkpoint-000002 was not saved, .*No space left"):
        run(tmp_path, Failing(whole.second[10], 1, errno.ENOSPC), settings)
    assert sound(tmp_path) == [1]


def test_a_run_of_which_nothing_could_be_saved_is_an_error(tmp_path: Path) -> None:
    """Require the error at the end, after `finish` has received the model. A run that saved
    anything ends with a result.
    """
    finished: list[bool] = []
    failing = Failing(1, float("inf"), errno.ENOSPC)
    with (
        interposed(tmp_path / "checkpoints", failing),
        pytest.raises(SaveFailed, match=r"finished at step 3, .*No space left.* None of the check"),
    ):
        fit(recipe(), SHORT, backend="cpu", out=tmp_path, finish=lambda _: finished.append(True))
    assert finished == [True]


# --- real file systems --------------------------------------------------------------------------

MS_RDONLY, MS_REMOUNT, MS_PRIVATE, MS_REC = 1, 32, 1 << 18, 1 << 14
CLONE_NEWNS = 0x20000


DISKS = {"full": "size=64k", "full of files": "size=1m,nr_inodes=14", "read-only": "size=1m"}
SAID = {
    "full": "bytes to write and|No space left on device",  # before it is begun, or at its end
    "full of files": "No space left on device",
    "read-only": "Read-only file system",
}


def mount(target: Path, flags: int, options: str = "") -> None:
    """Mount a file system in memory, which this process alone sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", bytes(target), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def own_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def on_a_disk(what: str, out: Path, environment: dict[str, str]) -> None:
    """Mount a disk and check everything. This runs in a process of its own, since the mount ends
    with it.
    """
    try:
        own_mounts()
        mount(out, 0, DISKS[what])
    except PermissionError:
        sys.exit(77)
    events: list[Any] = []

    def note(event: Any) -> None:
        events.append(event)
        if what == "read-only" and isinstance(event, StepEnded) and event.step == 2:
            mount(out, MS_REMOUNT | MS_RDONLY)

    keeps_all = replace(SHORT, checkpoint=replace(SHORT.checkpoint, keep_last=10), steps=6)
    result = fit(recipe(), keeps_all, backend="cpu", out=out, observers=[note])
    assert result.reason == "finished"
    errors = [event.error for event in events if isinstance(event, Saved) and event.error]
    assert errors and all(re.search(SAID[what], error) for error in errors), errors
    steps = sound(out)
    assert steps and steps[-1] < 6, steps
    assert result.checkpoint is not None and result.checkpoint.name.endswith(str(steps[-1]))
    again: list[Any] = []
    with pytest.raises(SaveFailed, match=SAID[what]):  # it resumes, and still cannot save
        fit(recipe(), keeps_all, backend="cpu", out=out, resume="auto", observers=[again.append])
    assert [event.step for event in again if isinstance(event, Resumed)] == [steps[-1]]


@pytest.mark.few(1)
@pytest.mark.parametrize("what", DISKS)
def test_a_disk_that_is(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    (process,) = start(what, folder, 1, on_a_disk)
    process.join(120)
    if process.exitcode == 77:
        pytest.skip("mounting is not allowed here")
    assert process.exitcode == 0


# --- the command line ---------------------------------------------------------------------------

RECIPE = f"""
from dataclasses import replace
from {__name__} import SHORT, act, recipe as plain

seen = []
settings = replace(
    SHORT, steps=6, log_every=1, micro_batch=None, checkpoint=replace(SHORT.checkpoint, keep_last=9)
)

def loss(module, batch):
    seen.append(None)
    act(len(seen))
    return plain().loss(module, batch)

recipe = replace(plain(), loss=loss)
"""
_disk = Path()
_acts: dict[int, str] = {}


def act(step: int) -> None:
    """Fill or empty the disk. The recipe calls this in each of its forwards."""
    what = _acts.get(step, "")
    if "fill" in what:
        with suppress(OSError), open(_disk / "filling", "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    if "free" in what:
        (_disk / "filling").unlink()
    if "read-only" in what:
        mount(_disk, MS_REMOUNT | MS_RDONLY)
    if "writable" in what:
        mount(_disk, MS_REMOUNT)
    if "signal" in what:
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Story:
    """A change of the disk at each of some steps, and how the command must end."""

    name: str
    acts: dict[int, str]
    code: int
    says: str = ""
    words: tuple[str, ...] = ()
    before: str = ""
    """Change of the disk before the command."""

    def __str__(self) -> str:
        return self.name


NOT_SAVED = "finished at step 6, which is not saved: "
STORIES = [
    Story("full from the start", {}, 1, NOT_SAVED, before="fill"),
    # full for four steps, whose records need more than what is left of the last page of memory
    Story("full, then not", {2: "fill", 6: "free"}, 0),
    Story("read-only, then not", {3: "read-only", 5: "writable"}, 0),
    Story("read-only to the end", {3: "read-only"}, 1, NOT_SAVED),
    Story("full at the end", {6: "fill"}, 1, NOT_SAVED),
    Story("full at a signal", {4: "fill signal"}, EXIT_PREEMPTED),
    Story(
        "to end then",
        {3: "fill"},
        1,
        "checkpoint-000003 was not saved",
        ("--set=checkpoint.stop_on_error=true",),
    ),
]
QUICK = ("full, then not", "read-only to the end")


def drivetrain(printed: Path, *words: str) -> int:
    """Run `drivetrain train`, with its output in a file; return its exit code."""
    from drivetrain.cli import main

    with suppress(OSError):
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.argv = ["drivetrain", "train", *words]
    sys.stdout = os.fdopen(os.dup(1), "w")
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def commanded(story: Story, out: Path, environment: dict[str, str]) -> None:
    """Run a story. This runs in a process of its own, which mounts a disk at `out`."""
    global _disk
    try:
        own_mounts()
        mount(out, 0, "size=1m")
    except PermissionError:
        sys.exit(77)
    os.dup2(os.open(out.parent / "words", os.O_WRONLY | os.O_CREAT), 2)
    _disk, run = out, out / "run"
    # on that disk, as `nohup` has it; a file system with a file that is written to stays writable
    printed = (out if "full" in story.name else out.parent) / "printed"
    recipe = str(out.parent / "recipe.py")
    words = (recipe, "--backend=cpu", f"--out={run}", "--resume=auto")
    _acts.update({0: story.before})
    act(0)
    _acts.update(story.acts)
    assert drivetrain(printed, *words, *story.words) == story.code
    if story.name != "read-only to the end":  # where nothing can be removed either
        assert not [path.name for path in run.glob("**/.*")]
    before = read_records(run / "metrics.jsonl")
    if story.code == 0:
        assert [record["step"] for record in before if record["event"] == "logged"] == [
            *range(1, 7)
        ]
        assert "finished at step 6" in (run / "report.html").read_text()
        assert printed.read_text().count(f"{run} cannot be written") == 1
    _acts.clear()
    _acts[0] = "free" if (out / "filling").exists() else "writable"
    act(0)
    assert drivetrain(printed, *words, "--steps=8") == 0
    assert not [path.name for path in run.glob("**/.*")]
    assert read_records(run / "metrics.jsonl")[: len(before)] == before
    assert sound(run)[-1] == 8
    assert read_config(run)["settings"]["steps"]["value"] == 8
    assert "finished at step 8" in (run / "report.html").read_text()


@pytest.mark.parametrize("story", only_quick(STORIES, lambda story: story.name in QUICK), ids=str)
def test_the_command_on_a_disk_that_is(story: Story, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    folder = tmp_path / "disk"
    folder.mkdir()
    (process,) = start(story, folder, 1, commanded)
    process.join(120)
    if process.exitcode == 77:
        pytest.skip("mounting is not allowed here")
    words = (tmp_path / "words").read_text()
    assert process.exitcode == 0, words
    assert story.says in words and "Traceback" not in words
