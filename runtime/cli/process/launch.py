"""Starts the ranks of a run by torchrun, called in this process so that the exit code and the
message of the rank that failed first are reported.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import cast

from ...data.parent import LAUNCHER
from ...data.stop_signals import STOP_SIGNALS, blocked_in_children
from ...kernel.contract import Driver
from ...kernel.errors import EXIT_PREEMPTED, SettingError
from ...launched import SHARED_FOLDER, is_launched
from ...rank_launcher import Process, RankLauncher
from ...registry import accelerators
from ...run.quoted import say
from .early_signals import nothing_done
from .outcomes import FINISHED, OUTCOMES, PREEMPTED, RESTARTS, have_begun
from .program import pass_on

__all__ = ["Launch", "check_ranks", "launched_as", "run_ranks"]

RANKS_PER_CPU = 4
"""Most processes for each CPU; more are taken for a typing error."""


@dataclass(frozen=True)
class Launch:
    """The number of ranks, and the options that are handed to torchrun unchanged."""

    nproc: int
    nnodes: str | None = None
    torchrun: Mapping[str, str] | None = None
    """The given options, such as `rdzv-endpoint`, and their values."""

    @property
    def wanted(self) -> bool:
        """True if more than this one process is requested."""
        return self.nproc > 1 or self.nnodes is not None

    def check(self) -> None:
        """Raises `SettingError` for options that cannot start a process."""
        if self.nproc < 1:
            raise SettingError(f"--nproc is {self.nproc}; it must be at least 1")
        if self.torchrun and not self.wanted and not is_launched():
            raise SettingError(
                f"--{next(iter(self.torchrun))} is an option of torchrun, which is not used for "
                "one process: give --nproc or --nnodes, too"
            )

    @property
    def may_restart(self) -> bool:
        """True if ranks may be restarted, with others or after a failure, before the run ends."""
        least, _, most = (self.nnodes or "1").partition(":")
        restarts = dict(self.torchrun or {}).get("max-restarts", "0")
        return most not in ("", least) or restarts != "0"

    def flags(self) -> list[str]:
        """Return torchrun's command line, up to the program. One node is always standalone: a fixed
        port would clash with another run on the same machine."""
        given = dict(self.torchrun or {})
        flags = [f"--nproc-per-node={self.nproc}"]
        if self.nnodes is not None:
            flags.append(f"--nnodes={self.nnodes}")
        if self.nnodes in (None, "1", "1:1") and not given:
            flags.append("--standalone")
        return flags + [f"--{name}={value}" for name, value in given.items()]


@contextmanager
def launched_as(ranks: int) -> Iterator[None]:
    """Make this process look like one of `ranks` until the block ends, so that `auto` and the
    drivers' probes answer what they will answer on the ranks."""
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]


def check_ranks(nproc: int, driver: Driver) -> None:
    """Raises `SettingError` when this machine does not allow so many ranks."""
    devices = accelerators(driver.probe())
    if devices and nproc > len(devices):
        raise SettingError(
            f"--nproc is {nproc}, and backend {driver.name!r} sees {len(devices)} devices "
            f"({', '.join(devices)}); give at most {len(devices)}"
        )
    cpus = os.cpu_count() or 1
    if nproc > RANKS_PER_CPU * cpus and not devices:
        raise SettingError(
            f"--nproc is {nproc}, and this machine has {cpus} CPUs; give at most "
            f"{RANKS_PER_CPU * cpus} ({RANKS_PER_CPU} for each CPU)"
        )


def run_ranks(
    launch: Launch, arguments: Sequence[str], launcher: RankLauncher | None = None
) -> int:
    """Run `drivetrain ARGUMENTS` on every rank of this node; return the exit code of the run.

    The message of the rank that failed first is printed once, with its rank. `launcher`: starts the
    ranks of a run that continues without ranks that die; None: torchrun starts them.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    if launcher is not None and (launch.nnodes is not None or launch.torchrun):
        option = "nnodes" if launch.torchrun is None else next(iter(launch.torchrun))
        raise SettingError(
            "recover=in_place works on one machine, and its ranks are not started by torchrun: "
            f"leave --{option} out"
        )
    # torchrun's parser would give each rank one thread; a fair share of the CPUs is faster
    share = max(1, (os.cpu_count() or 1) // launch.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        command: Namespace | None = None
        if launcher is None:
            command = _torchrun(launch, arguments, log_dir=str(Path(folder, "torchrun")))
        os.environ[OUTCOMES], os.environ[LAUNCHER] = folder, str(os.getpid())
        os.environ[SHARED_FOLDER] = folder
        pass_on()
        if launch.may_restart:
            os.environ[RESTARTS] = "1"
            # each start of the ranks gets its own store: entries of the start before would mislead
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        # a rank that is stopped finishes its step and saves: give it the time
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
        if launch.nnodes is None:  # for one node, we report the same in one line
            logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        try:
            # ranks are started with signals blocked, until they handle them (`early_signals`)
            with _handlers_kept(), blocked_in_children():
                if launcher is not None:
                    return _run_in_place(launcher, arguments, folder)
                run(command)  # type: ignore[no-untyped-call]
            return 0 if launch.may_restart else _report_end(folder, 0, 0, launch.nproc)
        except ChildFailedError as error:
            failed_rank, failure = error.get_first_failure()
            return _report_end(folder, failed_rank, failure.exitcode, launch.nproc)
        except SignalException as error:
            return _report_signal(folder, int(error.sigval), launch.nproc)
        finally:
            os.environ.pop(OUTCOMES, None)
            os.environ.pop(LAUNCHER, None)
            os.environ.pop(SHARED_FOLDER, None)
            os.environ.pop(RESTARTS, None)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that torch's agent replaces."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # SIGUSR1 would end the launcher alone: it becomes SIGTERM, which is passed on to the ranks
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _torchrun(launch: Launch, arguments: Sequence[str], log_dir: str) -> Namespace:
    """Parse torchrun's command, whose log folder is `log_dir` unless the flags name another.

    Raises `SettingError` for flags that torchrun does not take.
    """
    from torch.distributed.run import config_from_args, parse_args

    printed = io.StringIO()
    try:
        with redirect_stderr(printed):  # argparse prints all flags and exits
            command = parse_args([*launch.flags(), "-m", "drivetrain.cli"])  # type: ignore[no-untyped-call]
            command.log_dir = command.log_dir or log_dir  # torch does not delete its default folder
            config_from_args(command)
    except (Exception, SystemExit) as error:
        why = printed.getvalue().strip().rpartition("error: ")[2] or str(error)
        raise SettingError(f"torchrun refuses {' '.join(launch.flags())}: {why}") from error
    command.training_script_args = list(arguments)  # not parsed: they share prefixes with flags
    return cast(Namespace, command)


def _report_signal(folder: str, number: int, nproc: int) -> int:
    """Report how the ranks ended after a signal to the launcher; return the exit code."""
    outcomes = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(outcomes) == nproc and all(outcome["message"] == FINISHED for outcome in outcomes):
        return 0  # the signal came when all ranks had finished
    if not outcomes and not have_begun(folder):
        say(nothing_done(number), label="error:", style="bold red")
        return EXIT_PREEMPTED
    return _report_end(folder, 0, 128 + number, nproc)


class _Rank(subprocess.Popen[bytes]):
    """The process of a rank, which writes how it ends to a file."""

    outcome = Path()

    def error(self) -> str:
        """See `Process`."""
        with suppress(OSError, ValueError, KeyError):
            return str(json.loads(self.outcome.read_text())["message"])
        return ""


def _run_in_place(launcher: RankLauncher, arguments: Sequence[str], folder: str) -> int:
    """Run the ranks, and continue without those that die; report how the others ended."""
    signals = list[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        launcher.signal_all(number)

    def start(environment: Mapping[str, str], descriptors: tuple[int, ...]) -> Process:
        rank = _Rank(
            [sys.executable, "-u", "-m", "drivetrain.cli", *arguments],
            env={**os.environ, **environment},
            pass_fds=descriptors,
            start_new_session=True,
        )
        rank.outcome = Path(folder, f"{environment['RANK']}.json")
        return rank

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    ended = launcher.run(start)
    left = launcher.nproc - ended.num_missing
    for path in Path(folder).glob("*.json"):
        if json.loads(path.read_text())["rank"] >= launcher.nproc:
            path.unlink()  # of a spare that could not start, which ends nothing
    if signals and not ended.exit_code:
        return _report_signal(folder, signals[0], left)
    return _report_end(folder, ended.failed_rank, ended.exit_code, left)


def _report_end(folder: str, failed_rank: int, exit_code: int, nproc: int) -> int:
    """Print the message of the rank that failed first, or that there is none; return the exit
    code."""
    outcomes = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    notes = [note for note in outcomes if note["message"] != FINISHED]
    if not notes and not exit_code:
        if missing := nproc - len(outcomes):
            say(
                f"{missing} of {nproc} processes ended with exit code 0 before the run was done: "
                "something that the recipe calls ends them, such as os._exit",
                label="error:",
                style="bold red",
            )
        return 1 if missing else 0
    if not notes:
        if exit_code in [note["code"] for note in outcomes]:
            return exit_code  # all ranks finished, and what they printed says why it is not 0
        return _report_death(failed_rank, exit_code)
    first = min(notes, key=lambda note: (-int(note["attempt"]), float(note["time"])))
    was_stopped = first["code"] == EXIT_PREEMPTED and first["message"] != PREEMPTED
    if was_stopped and exit_code < 0:
        return _report_death(failed_rank, exit_code)  # for which the launcher stopped the others
    if first["message"] != PREEMPTED:
        say(first["message"], label=f"error (rank {first['rank']}):", style="bold red")
    return int(first["code"])


def _report_death(rank: int, exit_code: int) -> int:
    """Print how a rank ended that could print nothing; return the exit code."""
    death = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    say(f"it ended with {death} and left no message", label=f"error (rank {rank}):")
    return exit_code if exit_code > 0 else 128 - exit_code
