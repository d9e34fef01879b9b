"""Notices of preemption besides the stop signals: a file that appears, a command that succeeds, or
a further signal. Each asks the run to save and stop after its step."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..data.stop_signals import STOP_SIGNALS
from ..kernel.errors import SettingError, printable
from ..kernel.events import Request, Requests
from ..launched import is_first_of_machine, rank

__all__ = ["check_notices", "passed_to_ranks", "preempt_on_notice", "refuse_present_files"]

_FORMS = (
    "file:/path (the path exists), command:... (its exit code is 0), or signal:SIGUSR2 (the signal "
    "arrives)"
)
_LOOK_SECONDS = 1.0
"""Seconds between two looks for a file."""
_COMMAND_SECONDS = 5.0
"""Seconds between two runs of a command."""
_LONGEST_SECONDS = 5.0
"""Seconds that one run of a command may take."""
_CANNOT_RUN = (126, 127)
"""Exit codes of a shell that cannot run a command."""
_NEEDED = (
    *("SIGKILL", "SIGSTOP"),  # cannot be handled
    *("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"),  # crashes
    *("SIGCHLD", "SIGCLD", "SIGPIPE"),  # used by torch's loader and by Python
)
"""Signals that cannot be a notice."""


@dataclass(frozen=True)
class _Notice:
    """A notice, parsed."""

    text: str
    """The notice as the setting has it."""
    kind: str
    """file, command or signal."""
    value: str
    number: int = 0
    """The number of a signal."""

    @property
    def name(self) -> str:
        """The notice in a message: one line of moderate length."""
        return printable(" ".join(self.text.split()))[:120]


def check_notices(notices: Any) -> None:
    """Raises `SettingError` for a value of `preemption_notice` that has none of the forms."""
    if isinstance(notices, str):
        raise SettingError(
            f"preemption_notice is the text {notices!r:.200}; give a tuple of notices: "
            f"({notices!r:.200},)"
        )
    if isinstance(notices, (tuple, list)):  # other types are refused as for any setting
        for text in notices:
            _parsed(text)


def _parsed(text: Any) -> _Notice:
    kind, _, value = text.partition(":") if isinstance(text, str) else ("", "", "")
    value = value.strip()
    if kind not in ("file", "command", "signal") or not value or "\0" in value:
        raise SettingError(
            f"preemption_notice has {text!r:.200}, which is not a notice; write {_FORMS}"
        )
    if kind == "file":
        value = os.path.expanduser(value)
    return _Notice(text, kind, value, _signal_number(text, value) if kind == "signal" else 0)


def _signal_number(text: str, value: str) -> int:
    """Return the number of a signal given by number or name, with or without SIG."""
    named = signal.Signals.__members__
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 4 else None
    for name in (value.upper(), f"SIG{value.upper()}"):
        number = named.get(name, number)
    if number not in signal.valid_signals():
        raise SettingError(
            f"preemption_notice has {text!r:.200}, and this system has no signal {value!r:.50}; "
            "write the name or the number of one, such as signal:SIGUSR2"
        )
    if number in STOP_SIGNALS:
        raise SettingError(
            f"preemption_notice has {text!r:.200}, and each run saves and stops on this signal "
            "already: remove the notice"
        )
    if number in [named[name] for name in _NEEDED if name in named]:
        raise SettingError(
            f"preemption_notice has {text!r:.200}, and this signal cannot be a notice: the system "
            "or the program itself uses it. Take another one, such as signal:SIGUSR2"
        )
    return int(number)


@contextmanager
def preempt_on_notice(
    notices: Sequence[str], requests: Requests, saves: bool = True, again: bool = False
) -> Iterator[None]:
    """Request preemption on the first of `notices` that comes in the block. All ranks call it.

    On each machine, a thread of one rank looks for files and runs commands. Each rank handles
    signals. The rank that receives a notice prints it on stderr; of a signal, only rank 0 does.

    Raises `SettingError` if a file exists already, or if this process cannot handle a signal.
    `again`: the run has started before, in this process or in others, and the file is a notice.
    """
    if not notices:
        yield
        return
    if not again:
        refuse_present_files(notices)
    parsed = [_parsed(text) for text in notices]
    label = f"rank {rank()}: " if rank() else ""
    does = f"{'saving' if saves else 'stopping'} after this step"
    with ExitStack() as stack:
        for notice in parsed:
            if notice.kind == "signal":
                line = "" if label else f"{notice.name}: {does}\n"
                stack.enter_context(_handled(notice, requests, line))
        watched = [notice for notice in parsed if notice.kind != "signal"]
        if watched and is_first_of_machine():
            stack.enter_context(_Watch(watched, requests, label, does).running())
        yield


def refuse_present_files(notices: Sequence[str]) -> None:
    """Raises `SettingError` if the file of a notice exists. It may be left from an earlier notice,
    and each start would stop at once."""
    for notice in map(_parsed, notices):
        if notice.kind == "file" and os.path.exists(notice.value):
            raise SettingError(
                f"preemption_notice has {notice.text!r:.200}, and this file exists already: the "
                "run would stop without training. If the file is left from an earlier notice, "
                f"remove it (rm {shlex.quote(notice.value)}), and start again"
            )


class _Watch:
    """Looks for files and runs commands in a thread, until one of them is a notice."""

    def __init__(
        self, notices: Sequence[_Notice], requests: Requests, label: str, does: str
    ) -> None:
        self._files = [notice for notice in notices if notice.kind == "file"]
        self._commands = [notice for notice in notices if notice.kind == "command"]
        self._requests, self._label, self._does = requests, label, does
        self._over = threading.Event()
        self._warned: set[_Notice] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread in the block."""
        thread = threading.Thread(target=self._watch, name="drivetrain-notice", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_LONGEST_SECONDS)  # not for ever: a file system may not answer

    def _watch(self) -> None:
        due = 0.0
        came: _Notice | None = None
        while came is None:
            present = (notice for notice in self._files if os.path.exists(notice.value))
            came = next(present, None)
            if came is None and time.monotonic() >= due:
                came = next(filter(self._succeeds, self._commands), None)
                due = time.monotonic() + _COMMAND_SECONDS
            if came is None and self._over.wait(_LOOK_SECONDS):
                return
        if self._over.is_set():
            return
        more = "; remove the file before you start again" if came.kind == "file" else ""
        _print(f"{self._label}{came.name}: {self._does}{more}")
        self._requests.ask(Request.PREEMPT)
        # a request is lost if the loop takes the requests at this moment, or a step has to be
        # repeated with less memory
        while not self._over.wait(_LOOK_SECONDS):
            self._requests.ask(Request.PREEMPT)

    def _succeeds(self, notice: _Notice) -> bool:
        """Run a command; return True if its exit code is 0. Warn once of a command that cannot be
        run."""
        if self._over.is_set():
            return False
        try:
            code = _exit_code(notice.value, self._over)
        except TimeoutError:
            self._warn(notice, f"took more than {_LONGEST_SECONDS:g} s, and was killed")
            return False
        except OSError as error:
            self._warn(notice, f"cannot be run ({error})")
            return False
        if code in _CANNOT_RUN:
            self._warn(notice, f"cannot be run (exit code {code} of the shell)")
        return code == 0

    def _warn(self, notice: _Notice, what: str) -> None:
        if notice not in self._warned:
            self._warned.add(notice)
            _print(
                f"{self._label}warning: the preemption notice {notice.name!r} {what}: no notice "
                "comes from it. Training continues, and the command is tried again. Correct "
                "preemption_notice"
            )


def _exit_code(command: str, over: threading.Event) -> int | None:
    """Run a command in a shell, and return its exit code. Raises `TimeoutError` if it takes too
    long. Return None if `over` is set meanwhile. In both cases its processes are killed."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + _LONGEST_SECONDS
    seconds = 0.01
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError
            if over.wait(seconds):
                return None
            seconds = min(2 * seconds, 0.1)
        return process.returncode
    finally:
        with contextlib.suppress(OSError):  # no process of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _handled(notice: _Notice, requests: Requests, line: str) -> Iterator[None]:
    """Request preemption when the signal of `notice` arrives in the block, and print `line` once.

    Raises `SettingError` outside the main thread, and if the program handles this signal already.
    """
    if threading.current_thread() is not threading.main_thread():
        raise SettingError(
            f"preemption_notice has {notice.text!r}, and training runs in the thread "
            f"{threading.current_thread().name!r}: Python handles signals in the main thread "
            "alone. Train there, or use file: or command:"
        )
    before = signal.getsignal(notice.number)
    if before not in (signal.SIG_DFL, signal.SIG_IGN, _as_sigterm):
        raise SettingError(
            f"preemption_notice has {notice.text!r}, and the program handles this signal already "
            f"({'outside Python' if before is None else before!r:.100}). Take another signal, or "
            "remove that handler"
        )
    owner, lines = os.getpid(), [line]

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # a forked data worker: its parent needs it until it has saved
        requests.ask(Request.PREEMPT)
        with contextlib.suppress(OSError):  # `print` must not be called within itself
            os.write(2, (lines.pop() if lines else "").encode())

    signal.signal(notice.number, handle)
    try:
        yield
    finally:
        signal.signal(notice.number, before)


@contextmanager
def passed_to_ranks(notices: Sequence[str]) -> Iterator[None]:
    """Let a launcher pass on the signals of `notices` to its ranks as SIGTERM in the block, since
    they would end the launcher alone."""
    numbers = {notice.number for notice in map(_parsed, notices) if notice.kind == "signal"}
    if threading.current_thread() is not threading.main_thread():
        numbers = set()
    before = {number: signal.signal(number, _as_sigterm) for number in sorted(numbers)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _as_sigterm(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the disk may be full, or stderr closed
        print(text, file=sys.stderr, flush=True)
