"""One run at a time writes to a folder, or to a URL: a small file there names it.

The file is claimed in one act where the storage can, and no system of locks is needed. Its holder
renews it every `BEAT_SECONDS`. Another run that finds it

- ends at once when the holder lives: it runs on this machine, or renews the file meanwhile;
- takes it over at once when the holder is dead on this machine, or belongs to this run's own job,
  whose launcher has ended its processes before it starts others;
- takes it over when a holder on another machine has not renewed it for `SILENT_SECONDS`.

A holder that did not renew it for so long, and continues, finds that the file is another run's and
ends: it reads the file with each beat, and before each save.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..checkpoint import read_small, storage_of
from ..kernel.contract import Session
from ..kernel.errors import CheckpointDamaged, OutputError
from ..kernel.paths import Place
from .start_checks import on_rank_0

__all__ = ["BEAT_SECONDS", "LOCK", "NO_ROOM", "SILENT_SECONDS", "Holder", "RunLock"]

LOCK = ".run.lock"
"""In a run folder, while a run writes there."""
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_SETTLE_SECONDS = 0.5
"""At a URL, where two runs may both seem to hold the lock, the wait until the last one is seen."""
_MOST_BYTES = 1 << 16
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a disk that is full, read-only or broken: no reason to end a run."""


@dataclass(frozen=True)
class Holder:
    """A process that writes to a run folder."""

    host: str
    machine: str
    """Whose process numbers these are: the boot, and the container."""
    process: int
    started: str
    """When, by the machine's own count: numbers of processes are used again."""
    since: str
    job: str
    """The job of a launcher that restarts its processes; empty without one."""

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        now = datetime.now(timezone.utc)
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            process=os.getpid(),
            started=_started(os.getpid()),
            since=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
            job="" if job == "none" else job,
        )

    @classmethod
    def read(cls, raw: bytes) -> Holder | None:
        """None where it says nothing that is understood: half written, or somebody else's."""
        try:
            told = json.loads(raw)
            known = {item.name: told[item.name] for item in fields(cls)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        sound = all(type(v) is (int if k == "process" else str) for k, v in known.items())
        return cls(**known) if sound else None

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Equal for the same process."""
        return self.host, self.machine, self.process, self.started

    def lives(self) -> bool | None:
        """None where this machine cannot know."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        return self.started != "" and _started(self.process) == self.started

    def __str__(self) -> str:
        host, since = (
            "".join(c for c in text if c.isprintable())[:80] for text in (self.host, self.since)
        )
        return f"process {self.process} on {host}, since {since}"


class RunLock:
    """The lock of one run folder, for one run."""

    def __init__(self, folder: Place) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.lost = ""
        """The run that has taken it over; empty as long as none has."""
        self._storage = storage_of(folder)
        self._me = Holder.here()
        self._count = 0
        self._seen: tuple[Any, float] | None = None  # of another's, and when it was first seen so
        self._leader: RunLock | None = None
        """The one that holds it for this process: this one, or that of a run that is under way."""
        self._holders = 0
        self._made = False
        self._released = threading.Event()

    def take(self, session: Session, tell: Callable[[str], None]) -> None:
        """Take the lock; called by all ranks, held by the first. `tell` is called on all of them
        with the reason for a wait. Raises `OutputError`, with the holder, where another run
        holds it."""
        noted = ""
        while True:
            held, note = on_rank_0(session, self._try)
            if note and note != noted:
                tell(note)
            if held:
                return
            noted = note

    def release(self) -> None:
        """Give it back; on every rank, and more than once."""
        leader, self._leader = self._leader, None
        if leader is None or leader._me.process != os.getpid():
            return
        with _MUTEX:
            leader._holders -= 1
            if leader._holders:
                return
            leader._released.set()
            del _ours[leader._name()]
        with contextlib.suppress(OSError):
            if leader._is_mine(leader._look()[0]):
                leader._storage.remove(leader.path)
            if leader._made and isinstance(leader.folder, Path):
                leader.folder.rmdir()  # where nothing came of the run

    def check(self) -> None:
        """Raises `OutputError` where the last beat has found it to be another's."""
        if self._leader is not None and self._leader.lost:
            raise OutputError(
                f"{self.folder} was taken over by another run ({self._leader.lost}): nothing was "
                f"heard of this one for {SILENT_SECONDS:.0f} s: this one ends, and writes nothing "
                "more there"
            )

    def check_now(self) -> None:
        """The same, by looking at it; on the rank that holds it."""
        if self._leader is not None:
            self._leader._beat()
            self.check()

    # --- to get it --------------------------------------------------------------------------

    def _try(self) -> tuple[bool, str]:
        """Try once; returns whether the lock is held now, and a message."""
        if self._leader is not None or self._joined():
            return True, ""
        try:
            self._make_folder()
            if self._storage.claim(self.path, self._raw()):
                return self._settled(), ""
            return self._look_at_other()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise OutputError(
                    f"{self.folder} cannot be written: {error}; give another folder"
                ) from error
            self._begin()
            return True, (
                f"{self.folder} could not be locked against other runs: {error.strerror or error}. "
                "It is tried again"
            )

    def _make_folder(self) -> None:
        if isinstance(self.folder, Path) and not self.folder.is_dir():
            self._storage.make_folder(self.folder)
            self._made = True

    def _joined(self) -> bool:
        """True if a run of this process holds it, which is allowed."""
        with _MUTEX:
            self._leader = _ours.get(self._name())
            if self._leader is not None:
                self._leader._holders += 1
        return self._leader is not None

    def _look_at_other(self) -> tuple[bool, str]:
        raw, stamp = self._look()
        holder = Holder.read(raw)
        lives = holder.lives() if holder else None
        if holder and holder.key == self._me.key:
            return self._settled(), ""
        if lives is None:
            own_job = holder is not None and holder.job != "" and holder.job == self._me.job
            lives = False if own_job else self._heard_of((raw, stamp))
        who = str(holder) if holder else "a process that is not known"
        if lives:
            raise OutputError(
                f"another run writes to {self.folder}: {who}. Wait for its end, stop it, or give "
                f"another folder. If that is no run, delete {self.path}"
            )
        if lives is False:
            return self._taken_over(raw), ""
        time.sleep(_LOOK_SECONDS)
        return False, (
            f"{self.folder} was last written to by {who}, of which this machine knows nothing: it "
            f"is taken over when nothing is heard of it for {SILENT_SECONDS:.0f} s"
        )

    def _heard_of(self, now: Any) -> bool | None:
        """True where it has changed since the first look, False after a long silence."""
        seen = self._seen
        if seen is None:
            self._seen = now, time.monotonic()
        elif seen[0] != now:
            return True
        elif time.monotonic() - seen[1] >= SILENT_SECONDS:
            return False
        return None

    def _taken_over(self, raw: bytes) -> bool:
        """Put this run's in place of a dead one's, unless another run does so first."""
        name = f"{LOCK}.{hashlib.sha256(raw).hexdigest()[:16]}"
        claim = self.folder / name
        if not self._storage.claim(claim, self._raw()):
            claimer = Holder.read(_contents(claim))
            if claimer is None or claimer.key == self._me.key or not claimer.lives():
                self._storage.remove(claim)
            time.sleep(_LOOK_SECONDS)
            return False
        try:
            if self._look()[0] != raw:
                return False
            self._storage.replace(self.path, self._raw())
        finally:
            self._storage.remove(claim)
        return self._settled()

    def _settled(self) -> bool:
        """True if the file is still this run's, where several may have claimed it."""
        if not isinstance(self.path, Path):
            time.sleep(_SETTLE_SECONDS)
            if not self._is_mine(self._look()[0]):
                return False
        self._begin()
        return True

    # --- to keep it -------------------------------------------------------------------------

    def _begin(self) -> None:
        with _MUTEX:
            _ours[self._name()], self._leader, self._holders = self, self, 1
        self._released = released = threading.Event()

        def beat() -> None:
            while not (released.wait(BEAT_SECONDS) or self.lost):
                self._beat()

        threading.Thread(target=beat, name="drivetrain-lock", daemon=True).start()

    def _beat(self) -> None:
        """Show that this run lives. What cannot be done now is tried with the next."""
        with contextlib.suppress(OSError):
            if self._storage.claim(self.path, self._raw()):
                return  # there was no room for it before, or somebody has deleted it
            holder = Holder.read(self._look()[0])
            if holder is not None and holder.key != self._me.key:
                self.lost = str(holder)
            elif isinstance(self.path, Path):
                os.utime(self.path)
            else:
                self._count += 1
                self._storage.replace(self.path, self._raw())

    def _raw(self) -> bytes:
        return (json.dumps({**asdict(self._me), "beat": self._count}, indent=1) + "\n").encode()

    def _look(self) -> tuple[bytes, int]:
        """The file's content, and when it was renewed."""
        with contextlib.suppress(OSError):
            if isinstance(self.path, Path):
                return _contents(self.path), os.stat(self.path).st_mtime_ns
        return _contents(self.path), 0

    def _is_mine(self, raw: bytes) -> bool:
        holder = Holder.read(raw)
        return holder is not None and holder.key == self._me.key

    def _name(self) -> str:
        """Of the folder in `_ours`; a fork holds nothing of its parent's."""
        folder = self.folder.resolve() if isinstance(self.folder, Path) else self.folder
        return f"{os.getpid()} {folder}"


_MUTEX = threading.Lock()
_ours: dict[str, RunLock] = {}
"""The locks that runs of this process hold."""


def _contents(path: Place) -> bytes:
    """Nothing where there is no such file by now."""
    try:
        return read_small(path, _MOST_BYTES)
    except CheckpointDamaged:
        return b""


def _machine() -> str:
    boot = container = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
    return f"{boot} {container}"


def _started(process: int) -> str:
    """When that process of this machine began; empty where there is none, or it has ended."""
    try:
        told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _runs(process)
    return "" if told[0] in "ZX" else told[19]


def _runs(process: int) -> str:
    """Without /proc: all that is known is whether there is one of that number."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return "at some time"
    except OSError:
        return ""
    return "at some time"
