"""The environment in which a launcher, such as torchrun or srun, starts a process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from .kernel.errors import SettingError
from .lost_ranks import CHANNEL

__all__ = [
    "SHARED_FOLDER",
    "adopt_slurm",
    "is_first_of_machine",
    "is_first_rank",
    "is_launched",
    "local_rank",
    "rank",
    "restarts",
    "shared_folder",
    "world_size",
]

SHARED_FOLDER = "DRIVETRAIN_SHARED_FOLDER"
"""Environment: a folder for the ranks that drivetrain has started on this machine. It is removed
when they have ended."""


def rank() -> int:
    """Return this process's rank; 0 without a launcher. Raises `SettingError`, as all functions
    here, for a variable that is not a number."""
    return _number("RANK", 0)


def is_first_rank() -> bool:
    """True for rank 0, and without a launcher."""
    return rank() == 0


def local_rank() -> int:
    """Return this process's rank on its machine; 0 without a launcher."""
    return _number("LOCAL_RANK", 0)


def is_first_of_machine() -> bool:
    """True on one rank of each machine."""
    # where ranks die and join, on one machine, local rank 0 may be any of them
    return is_first_rank() or (local_rank() == 0 and CHANNEL not in os.environ)


def world_size() -> int:
    """Return the number of ranks that were launched; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def restarts() -> int:
    """Return how often torch's elastic agent has restarted the ranks."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def shared_folder() -> Path | None:
    """Return a folder for files of all ranks; None for one rank, for ranks on several machines, and
    for those that another launcher has started."""
    folder = os.environ.get(SHARED_FOLDER)
    is_alone = world_size() == 1 or _number("LOCAL_WORLD_SIZE", 0) != world_size()
    return None if folder is None or is_alone else Path(folder)


def is_launched() -> bool:
    """True if this process is a rank that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's environment variables from SLURM's under `srun` with several tasks.

    A batch script is not a task of `srun`. An interactive shell is a single task, whatever number
    of tasks the allocation has.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if "RANK" in environment or "SLURM_STEP_ID" not in environment or int(tasks) < 2:
        return
    job = int(environment.get("SLURM_JOB_ID", "0"))
    words = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": _first_host(environment),
        "MASTER_PORT": str(12000 + job % 20000),  # not an ephemeral port,
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


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise SettingError(
            f"the environment has {name}={text!r:.50}, which is not a number. A launcher sets it, "
            "such as torchrun; unset it to train in one process"
        )
    return int(text)
