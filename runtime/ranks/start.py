"""Starts ranks as forks of this process, by torch's elastic agent, and waits for their end.

A fork has all objects of the process, so recipes and closures of a notebook's cells need not be
imported or pickled. A fork has no threads: GNU OpenMP would wait for its parent's threads forever,
so ranks compute on one thread, which is torchrun's default, too. CUDA refuses to run in a fork.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Generic, TypeVar, cast

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .. import launched
from ..data.fork_gc import leave_the_parents_garbage
from ..data.socket_paths import keep_socket_paths_short
from ..data.stop_signals import STOP_SIGNALS, blocked, note_until_handled
from ..data.user_frames import last_line, user_frames
from ..kernel import errors
from ..kernel.errors import (
    EXIT_PREEMPTED,
    DrivetrainError,
    RecipeFailed,
    SettingError,
)
from ..rank_launcher import RankLauncher
from ..trainer.signals import StoppedBeforeStart

__all__ = ["run_on_ranks"]

T = TypeVar("T")

_LOOK_SECONDS = 0.2
_RUNNING = ".rank"
"""The suffix of an empty file that exists while a rank runs; its name is the rank's process
number."""
_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


def run_on_ranks(
    nproc: int,
    act: Callable[[], T],
    meanwhile: Callable[[float], None],
    launcher: RankLauncher | None = None,
) -> T:
    """Call `act` on `nproc` ranks, and return the result of rank 0. Raises the error of the first
    rank that failed, if it is an error of drivetrain's, else `RecipeFailed`.

    `meanwhile(seconds)` is called repeatedly until the ranks have ended, and may take that long. A
    signal that asks to save and stop is passed on to the ranks, whose result is returned. Raises
    `KeyboardInterrupt` for an interrupt before the ranks have connected, and for a second
    interrupt. `launcher`: starts the ranks of a run that continues without ranks that die; None:
    the run ends with the first of them.
    """
    _check(nproc)
    keep_socket_paths_short()
    leave_the_parents_garbage()  # such as the agent of earlier ranks
    with TemporaryDirectory(prefix="drivetrain-") as log_dir:
        folder = Path(log_dir)
        if launcher is not None:
            return _run(lambda: _launch_in_place(launcher, act, folder), folder, meanwhile)
        config = _configuration(nproc, log_dir)
        launch = cast(Callable[..., dict[int, T]], elastic_launch(config, _rank))
        return _run(lambda: launch(act, folder)[0], folder, meanwhile)


def _configuration(nproc: int, log_dir: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir),
    )


def _launch_in_place(launcher: RankLauncher, act: Callable[[], T], folder: Path) -> T:
    """Fork the ranks, and continue without those that die. Raises `ChildFailedError` as torch's
    agent does."""
    forks: list[_Fork[T]] = []

    def start(environment: Mapping[str, str], descriptors: tuple[int, ...]) -> _Fork[T]:
        os.environ.update(environment)  # restored by `_restore_after_agent`
        forks.append(_Fork(act, folder, int(environment["RANK"])))
        return forks[-1]

    ended = launcher.run(start)
    if ended.exit_code:
        failed = forks[ended.failed_rank]
        details = ended.failed_rank, failed.number, ended.exit_code, str(failed.error_file)
        raise ChildFailedError("fit", {ended.failed_rank: ProcessFailure(*details)})
    return dict(fork.result for fork in forks if fork.result is not None)[0]


class _Fork(Generic[T]):
    """A rank that is forked from this process."""

    def __init__(self, act: Callable[[], T], folder: Path, rank: int) -> None:
        self.result: tuple[int, T] | None = None
        """The number that the rank had at its end, and the result of `act`."""
        self.error_file = folder / f"{rank}.json"
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._call, args=(act, folder, theirs))
        self._process.start()
        theirs.close()

    @property
    def number(self) -> int:
        """The process number."""
        return self._process.pid or 0

    def _call(self, act: Callable[[], T], folder: Path, pipe: Connection) -> None:
        """Run the rank, in its process."""
        try:
            result = _rank(act, folder)
            pipe.send((launched.rank(), result))
            pipe.recv()  # shared memory of the result lives as long as this process
        except _RankFailure as failure:
            message = {"message": str(failure), "extraInfo": {"timestamp": int(time.time())}}
            self.error_file.write_text(json.dumps({"message": message}))
            os._exit(1)

    def wait(self) -> int:
        """See `Process`."""
        with suppress(EOFError, OSError):  # it has died
            self.result = self._pipe.recv()
            self._pipe.send(None)
        self._process.join()
        self._pipe.close()
        return self._process.exitcode or 0

    def send_signal(self, number: int, /) -> None:
        """See `Process`."""
        os.kill(self.number, number)

    def error(self) -> str:
        """See `Process`."""
        with suppress(OSError, ValueError, KeyError):
            return str(_fields_of(json.loads(self.error_file.read_text())["message"])["message"])
        return ""


def _fields_of(details: Any) -> dict[str, Any]:
    """Return what `_describe_failure` wrote, of what torch's agent passes on."""
    text = details["message"].removeprefix(f"{_RankFailure.__name__}: ")
    return cast(dict[str, Any], json.loads(text))


def _run(launch: Callable[[], T], folder: Path, meanwhile: Callable[[float], None]) -> T:
    """Launch ranks in a thread, from which they are forked. This thread shows records and passes on
    signals meanwhile."""
    results: list[T] = []
    failed: list[BaseException] = []

    def keep() -> None:
        try:
            with blocked():
                results.append(launch())
        except BaseException as error:
            failed.append(error)

    agent = threading.Thread(target=keep, name="drivetrain-agent")
    with _restore_after_agent(), _signals_passed_on(folder) as signals:
        agent.start()
        try:
            while agent.is_alive():
                meanwhile(_LOOK_SECONDS)
                signals.pass_on()
            meanwhile(0)
        except BaseException:
            signals.receive(signal.SIGTERM)
            raise
        finally:
            agent.join()
    if not failed:
        return results[0]
    if isinstance(failed[0], ChildFailedError):
        raise _error_of(failed[0], signals.received) from None
    raise failed[0]


def _check(nproc: int) -> None:
    if nproc < 1:
        raise SettingError(f"nproc is {nproc}; it must be at least 1")
    if "RANK" in os.environ:
        raise SettingError(
            f"nproc is {nproc}, and this process is rank {os.environ['RANK']} of a launcher that "
            "started as many as it was to: leave nproc out"
        )
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_initialized():
            raise SettingError(
                f"nproc is {nproc}, and this process has used a device ({name}), after which it "
                "cannot be forked into ranks: restart it (the notebook's kernel) and call fit "
                "before anything touches the device, or put the recipe into a file and run "
                f"`drivetrain train FILE --nproc {nproc}`"
            )


class _RankFailure(Exception):
    """The error of a rank as JSON: the agent passes on only the text of an exception."""


def _rank(act: Callable[[], T], folder: Path) -> T:
    note_until_handled()
    own = folder / f"{os.getpid()}{_RUNNING}"
    own.touch()
    os.environ[launched.SHARED_FOLDER] = str(folder)
    torch.set_num_threads(1)
    try:
        return act()
    except BaseException as error:
        raise _RankFailure(_describe_failure(error)) from error
    finally:
        own.unlink(missing_ok=True)


def _describe_failure(error: BaseException) -> str:
    ours = isinstance(error, (DrivetrainError, StoppedBeforeStart))
    blamed = error.__cause__ if ours else error
    fields = {
        "kind": type(error).__name__ if ours else RecipeFailed.__name__,
        "message": str(error) if ours else last_line(error),
        "frames": user_frames(blamed) if blamed is not None else "",
        "attributes": vars(error) if isinstance(error, DrivetrainError) else {},
    }
    return json.dumps(fields, default=str)


def _error_of(error: ChildFailedError, signals: Sequence[int]) -> BaseException:
    for number in signals:
        if any(failure.exitcode == 128 + number for failure in error.failures.values()):
            return _stopped(number, 128 + number)  # each rank has ended itself on a second signal
    rank, failure = error.get_first_failure()
    try:
        fields = _fields_of(failure.message)
        if fields["kind"] == StoppedBeforeStart.__name__:
            return _stopped(signals[0] if signals else signal.SIGTERM, EXIT_PREEMPTED)
        kind: type[DrivetrainError] = getattr(errors, fields["kind"], DrivetrainError)
        error_of_rank = kind.__new__(kind)  # some kinds make their message of parts
        error_of_rank.args = (f"rank {rank}: {fields['message']}\n{fields['frames']}".rstrip(),)
        vars(error_of_rank).update(fields["attributes"])
        return error_of_rank
    except (ValueError, KeyError, TypeError):
        code = failure.exitcode
        died = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RecipeFailed(f"rank {rank} ended with {died} and left no message")


def _stopped(number: int, code: int) -> BaseException:
    interrupted = KeyboardInterrupt("interrupted: the ranks stopped at once, without saving")
    return interrupted if number == signal.SIGINT else SystemExit(code)


class _Signals:
    """Passes signals of this process on to its ranks, including ranks that are forked later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received: list[int] = []
        self._passed: dict[str, int] = {}
        """Number of signals already sent to each rank, by its process number."""

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        self.received.append(number)
        self.pass_on()

    def pass_on(self) -> None:
        for rank in self.folder.glob(f"*{_RUNNING}") if self.received else ():
            for number in self.received[self._passed.get(rank.stem, 0) :]:
                with suppress(ProcessLookupError):
                    os.kill(int(rank.stem), number)
            self._passed[rank.stem] = len(self.received)


@contextmanager
def _signals_passed_on(folder: Path) -> Iterator[_Signals]:
    signals = _Signals(folder)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.receive) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _restore_after_agent() -> Iterator[None]:
    """Restore the log levels and the environment that the agent changes."""
    loggers, environment = [*map(logging.getLogger, _LOGGERS)], dict(os.environ)
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # time for a rank that was asked to stop, to finish its step and save
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
