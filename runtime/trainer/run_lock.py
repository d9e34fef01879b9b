"""The lock of a run folder or URL: one run at a time writes there, and a small file names that run.

The file is claimed in one atomic operation where the storage has one; no lock service is needed.
Its holder renews the file every `BEAT_SECONDS`. Another run that finds the file

- ends at once when the holder is alive: it runs on this machine, or renews the file meanwhile;
- takes it over at once when the holder is dead on this machine, or belongs to this run's own job,
  whose launcher has ended its processes before it starts others;
- takes it over when a holder on another machine has not renewed it for `SILENT_SECONDS`.

A holder reads the file with each beat and before each save. So a holder that did not renew the file
for `SILENT_SECONDS`, and then continues, finds that another run owns the file, and ends.
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
from ..kernel.errors import CheckpointDamaged, OutputError, StorageFailed
from ..kernel.paths import Place
from .start_checks import on_rank_0

__all__ = ["BEAT_SECONDS", "LOCK", "NO_ROOM", "SILENT_SECONDS", "Holder", "RunLock"]

LOCK = ".run.lock"
"""The lock file in a run folder, present while a run writes there."""
BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_SETTLE_SECONDS = 0.5
"""Time to wait at a URL, where two runs may both seem to hold the lock, until the last claim is
visible."""
_MOST_BYTES = 1 << 16
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a full, read-only or broken disk, which do not end a run."""


@dataclass(frozen=True)
class Holder:
    """A process that writes to a run folder."""

    host: str
    machine: str
    """Machine, by boot and container, on which the process number is valid."""
    process: int
    started: str
    """Start time of the process by the machine's own count, since process numbers are reused."""
    since: str
    job: str
    """The job of a launcher that restarts its processes; empty without one."""

    @classmethod
    def of_this_process(cls) -> Holder:
        """Describe this process."""
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
        """Parse the content of a lock file; None if it is half written or of an unknown format."""
        try:
            stored = json.loads(raw)
            known = {item.name: stored[item.name] for item in fields(cls)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        sound = all(type(v) is (int if k == "process" else str) for k, v in known.items())
        return cls(**known) if sound else None

    @property
    def key(self) -> tuple[str, str, int, str]:
        """A key that is equal for the same process."""
        return self.host, self.machine, self.process, self.started

    def is_alive(self) -> bool | None:
        """True if the process runs; None if this machine cannot know."""
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
        """The run that has taken the lock over; empty until one has."""
        self._storage = storage_of(folder)
        self._me = Holder.of_this_process()
        self._count = 0
        self._seen: tuple[Any, float] | None = None  # contents, first seen
        self._note = ""
        self._seen_folder: tuple[int, int] | None = None
        self._name = ""
        self._report: Callable[[str], None] = lambda note: None
        self._leader: RunLock | None = None
        """The lock object that holds the file for this process: this one, or the one of another
        active run."""
        self._holders = 0
        self._made = False
        self._released = threading.Event()

    def take(self, session: Session, report: Callable[[str], None]) -> None:
        """Take the lock. All ranks call this, and the first holds the lock. `report` is called on
        all ranks with the reason for a wait, and on the first rank if the folder disappears. Raises
        `OutputError`, which names the holder, if another run holds the lock."""
        noted, self._report = "", report
        while True:
            held, note = on_rank_0(session, self._try)
            if note and note != noted:
                report(note)
            if held:
                return
            noted = note

    def release(self) -> None:
        """Release the lock. Every rank may call this, more than once."""
        leader, self._leader = self._leader, None
        if leader is None or leader._me.process != os.getpid():
            return
        with _MUTEX:
            leader._holders -= 1
            if leader._holders:
                return
            leader._released.set()
            del _locks_held[leader._name]
        with contextlib.suppress(OSError):
            if leader._is_mine(leader._look()[0]):
                leader._storage.remove(leader.path)
            if leader._made and isinstance(leader.folder, Path):
                leader.folder.rmdir()  # if the run wrote nothing

    def check(self) -> None:
        """Raises `OutputError` if the last beat found that another run holds the lock."""
        if self._leader is self and self._note:
            note, self._note = self._note, ""
            self._report(note)
        if self._leader is not None and self._leader.lost:
            raise OutputError(
                f"{self.folder} was taken over by another run ({self._leader.lost}): this run had "
                f"not renewed its lock for {SILENT_SECONDS:.0f} s. It ends, and writes nothing "
                "more there"
            )

    def check_now(self) -> None:
        """Read the lock file now, then `check`. For the rank that holds the lock."""
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
        """True if another run of this process holds the lock, which is allowed."""
        with _MUTEX:
            self._name = _name_of(self.folder)
            self._leader = _locks_held.get(self._name)
            if self._leader is not None:
                self._leader._holders += 1
        return self._leader is not None

    def _look_at_other(self) -> tuple[bool, str]:
        raw, stamp = self._look()
        holder = Holder.read(raw)
        alive = holder.is_alive() if holder else None
        if holder and holder.key == self._me.key:
            return self._settled(), ""
        if alive is None:
            own_job = holder is not None and holder.job != "" and holder.job == self._me.job
            alive = False if own_job else self._holder_renews((raw, stamp))
        who = str(holder) if holder else "a process that is not known"
        if alive:
            raise OutputError(
                f"another run writes to {self.folder}: {who}. Wait for its end, stop it, or give "
                f"another folder. If that is no run, delete {self.path}"
            )
        if alive is False:
            return self._taken_over(raw), ""
        time.sleep(_LOOK_SECONDS)
        return False, (
            f"{self.folder} was last written to by {who}, which this machine cannot check. The "
            f"folder is taken over if its lock is not renewed for {SILENT_SECONDS:.0f} s"
        )

    def _holder_renews(self, now: Any) -> bool | None:
        """True if the lock file has changed since it was first read, False if it did not change for
        `SILENT_SECONDS`, None before that."""
        seen = self._seen
        if seen is None:
            self._seen = now, time.monotonic()
        elif seen[0] != now:
            return True
        elif time.monotonic() - seen[1] >= SILENT_SECONDS:
            return False
        return None

    def _taken_over(self, raw: bytes) -> bool:
        """Replace a dead run's lock file by this run's, unless another run does so first."""
        name = f"{LOCK}.{hashlib.sha256(raw).hexdigest()[:16]}"
        claim = self.folder / name
        if not self._storage.claim(claim, self._raw()):
            claimer = Holder.read(_contents(claim))
            if claimer is None or claimer.key == self._me.key or not claimer.is_alive():
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
        """True if the file is still this run's, at a place where several runs may have claimed
        it."""
        if not isinstance(self.path, Path):
            time.sleep(_SETTLE_SECONDS)
            if not self._is_mine(self._look()[0]):
                return False
        self._begin()
        return True

    # --- to keep it -------------------------------------------------------------------------

    def _begin(self) -> None:
        with _MUTEX:
            _locks_held[self._name], self._leader, self._holders = self, self, 1
        self._seen_folder = _identity(self.folder)
        self._released = released = threading.Event()

        def beat() -> None:
            while not (released.wait(BEAT_SECONDS) or self.lost):
                self._beat()

        threading.Thread(target=beat, name="drivetrain-lock", daemon=True).start()

    def _beat(self) -> None:
        """Renew the lock file. What fails now is tried again with the next beat."""
        self._look_at_folder()
        with contextlib.suppress(OSError):
            if self._storage.claim(self.path, self._raw()):
                return  # the disk was full before, or somebody deleted the file
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
        """Return the file's content, and when it was renewed."""
        with contextlib.suppress(OSError):
            if isinstance(self.path, Path):
                return _contents(self.path), os.stat(self.path).st_mtime_ns
        return _contents(self.path), 0

    def _is_mine(self, raw: bytes) -> bool:
        holder = Holder.read(raw)
        return holder is not None and holder.key == self._me.key

    def _look_at_folder(self) -> None:
        """Note once each time that the folder was deleted or replaced by another folder."""
        before, now = self._seen_folder, _identity(self.folder)
        if before is not None and now != before:
            what = "is another folder by now" if now else "was deleted or renamed"
            self._note = (
                f"{self.folder} {what}, while this run writes to it: the next save creates the "
                "folder again. If it was moved, earlier checkpoints moved with it"
            )
        self._seen_folder = now


_MUTEX = threading.Lock()
_locks_held: dict[str, RunLock] = {}
"""The locks that runs of this process hold, by `_name_of` their folder."""


def _name_of(folder: Place) -> str:
    """Return the key of a folder in `_locks_held`: its real path when the lock is taken, since the
    folder may be moved or linked to later. A fork holds no lock of its parent."""
    real = os.path.realpath(folder) if isinstance(folder, Path) else folder
    return f"{os.getpid()} {real}"


def _identity(folder: Place) -> tuple[int, int] | None:
    """Return the identity of a folder; None if it does not exist or lies at a URL."""
    if isinstance(folder, Path):
        with contextlib.suppress(OSError):
            found = os.stat(folder)
            return found.st_dev, found.st_ino
    return None


def _contents(path: Place) -> bytes:
    """Read the lock file; empty if it does not exist any more."""
    try:
        return read_small(path, _MOST_BYTES)
    except CheckpointDamaged:
        return b""
    except StorageFailed:
        if isinstance(path, Path):  # a disk error says nothing about the holder
            return b""
        raise


def _machine() -> str:
    boot = container = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        container = os.readlink("/proc/self/ns/pid")
    return f"{boot} {container}"


def _started(process: int) -> str:
    """Return the start time of a process of this machine; empty if it does not exist or has
    ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _is_running(process)
    return "" if stat[0] in "ZX" else stat[19]


def _is_running(process: int) -> str:
    """Return whether a process of this number exists, as a text: systems without /proc know no
    more."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return "at some time"
    except OSError:
        return ""
    return "at some time"
