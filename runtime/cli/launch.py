"""Starting the ranks of a run: torchrun's work, called in this process so that the exit code and
the message of the rank that failed first get through.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..data.parent import LAUNCHER
from ..kernel.contract import Driver
from ..kernel.errors import SettingError
from .failure import FINISHED, OUTCOMES, PREEMPTED, RESTARTS, say
from .program import pass_on

__all__ = ["Launch", "adopt_slurm", "check_ranks", "is_launched", "launched_as", "run_ranks"]

RANKS_PER_CPU = 4
"""More processes than this for each CPU is a typing error, not a wish."""


@dataclass(frozen=True)
class Launch:
    """The number of ranks, and the flags that go to torchrun as they are."""

    nproc: int
    nnodes: str | None = None
    torchrun: Mapping[str, str] | None = None
    """`rdzv-endpoint` and so on, those that were given."""

    @property
    def wanted(self) -> bool:
        """More than this one process is asked for."""
        return self.nproc > 1 or self.nnodes is not None

    def check(self) -> None:
        """Raises `SettingError` for what starts nothing."""
        if self.nproc < 1:
            raise SettingError(f"--nproc is {self.nproc}; it must be at least 1")
        if self.torchrun and not self.wanted and not is_launched():
            raise SettingError(
                f"--{next(iter(self.torchrun))} is handed to torchrun, which is not asked for one "
                "process: give --nproc or --nnodes, too"
            )

    @property
    def may_restart(self) -> bool:
        """True if ranks may be restarted, with others or after a failure, before the run ends."""
        least, _, most = (self.nnodes or "1").partition(":")
        restarts = dict(self.torchrun or {}).get("max-restarts", "0")
        return most not in ("", least) or restarts != "0"

    def flags(self) -> list[str]:
        """torchrun's command line, up to the program. One node is always standalone: a fixed port
        would clash with another run on the same machine."""
        given = dict(self.torchrun or {})
        flags = [f"--nproc-per-node={self.nproc}"]
        if self.nnodes is not None:
            flags.append(f"--nnodes={self.nnodes}")
        if self.nnodes in (None, "1", "1:1") and not given:
            flags.append("--standalone")
        return flags + [f"--{name}={value}" for name, value in given.items()]


def is_launched() -> bool:
    """This process is a rank that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def launched_as(ranks: int) -> Iterator[None]:
    """While it is open, this process looks like one of `ranks`: `auto` and the drivers' probes
    then answer what they will answer on the ranks."""
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Under `srun` with several tasks, set torchrun's environment variables from SLURM's."""
    if "RANK" in environment or int(environment.get("SLURM_NTASKS", "1")) < 2:
        return
    if "SLURM_PROCID" not in environment:
        return
    job = int(environment.get("SLURM_JOB_ID", "0"))
    words = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": _first_host(environment),
        "MASTER_PORT": str(12000 + job % 20000),  # none that systems give away,
    }
    for word, value in words.items():
        environment.setdefault(word, value)


def _first_host(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return "127.0.0.1"
    if "[" not in nodes:
        return nodes.split(",")[0]
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise SettingError(
            f"the first host of {nodes!r} could not be found with scontrol ({error}); set "
            "MASTER_ADDR in the environment"
        ) from error


def check_ranks(nproc: int, driver: Driver) -> None:
    """Raises `SettingError` when this machine does not allow so many ranks."""
    devices = driver.probe().devices
    accelerators = [device for device in devices if not device.startswith("cpu")]
    if accelerators and nproc > len(accelerators):
        raise SettingError(
            f"--nproc is {nproc}, and backend {driver.name!r} sees {len(accelerators)} devices "
            f"({', '.join(accelerators)}); give at most {len(accelerators)}"
        )
    cpus = os.cpu_count() or 1
    if nproc > RANKS_PER_CPU * cpus and not accelerators:
        raise SettingError(
            f"--nproc is {nproc}, and this machine has {cpus} CPUs; give at most "
            f"{RANKS_PER_CPU * cpus} ({RANKS_PER_CPU} for each CPU)"
        )


def run_ranks(launch: Launch, arguments: Sequence[str]) -> int:
    """Run `drivetrain ARGUMENTS` on every rank of this node; the exit code of the run.

    The message of the rank that failed first is printed once, with its rank.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    command = _torchrun(launch, arguments)
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        os.environ[OUTCOMES], os.environ[LAUNCHER] = folder, str(os.getpid())
        pass_on()
        if launch.may_restart:
            os.environ[RESTARTS] = "1"
            # a store for each start of the ranks: what the last ones left in theirs misleads
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        # torchrun would give each rank one thread; a rank's fair share of the CPUs is faster
        share = max(1, (os.cpu_count() or 1) // launch.nproc)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
        # a rank that was asked to stop finishes its step and saves: give it the time
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
        if launch.nnodes is None:  # what it would say of one node, we say in one line
            logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        # what would end the launcher alone becomes what it passes on
        signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            run(command)  # type: ignore[no-untyped-call]
            return 0 if launch.may_restart else _told(folder, 0, 0, launch.nproc)
        except ChildFailedError as error:
            failed_rank, failure = error.get_first_failure()
            return _told(folder, failed_rank, failure.exitcode, launch.nproc)
        except SignalException as error:
            return _told(folder, 0, 128 + int(error.sigval), launch.nproc)
        finally:
            os.environ.pop(OUTCOMES, None)
            os.environ.pop(LAUNCHER, None)
            os.environ.pop(RESTARTS, None)


def _torchrun(launch: Launch, arguments: Sequence[str]) -> Namespace:
    """torchrun's command. Raises `SettingError` for flags that it does not take."""
    from torch.distributed.run import config_from_args, parse_args

    told = io.StringIO()
    try:
        with redirect_stderr(told):  # argparse prints all flags and exits
            command = parse_args([*launch.flags(), "-m", str(__package__)])  # type: ignore[no-untyped-call]
            config_from_args(command)
    except (Exception, SystemExit) as error:
        why = told.getvalue().strip().rpartition("error: ")[2] or str(error)
        raise SettingError(f"torchrun refuses {' '.join(launch.flags())}: {why}") from error
    command.training_script_args = list(arguments)  # not parsed: they share prefixes with flags
    return cast(Namespace, command)


def _told(folder: str, failed_rank: int, exit_code: int, nproc: int) -> int:
    """Print what the first rank to fail left word of, or that it died without."""
    words = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    notes = [note for note in words if note["message"] != FINISHED]
    if not notes and not exit_code:
        if missing := nproc - len(words):
            say(
                f"{missing} of {nproc} processes ended with exit code 0 before the run was done: "
                "something that they call ends them (os._exit, say)",
                label="error:",
                style="bold red",
            )
        return 1 if missing else 0
    if not notes:
        death = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        say(f"it ended with {death} and left no message", label=f"error (rank {failed_rank}):")
        return exit_code if exit_code > 0 else 128 - exit_code
    first = min(notes, key=lambda note: (-int(note["attempt"]), float(note["time"])))
    if first["message"] != PREEMPTED:
        say(first["message"], label=f"error (rank {first['rank']}):", style="bold red")
    return int(first["code"])
