"""A batch script for Slurm, which requeues the job after an interruption."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from ...kernel.errors import EXIT_PREEMPTED, SettingError
from .job import Job

__all__ = ["script"]

_HOST = "$host"
_RUN_ID = "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"


def script(
    job: Job,
    program: Sequence[str],
    *,
    seconds: float | None,
    grace: float,
    gpus: int,
    options: Sequence[str],
) -> str:
    """Return the text of the script. `seconds` is the time limit, `grace` the seconds that a save
    may take before it. `options` are those of sbatch, without the dashes. Raises `SettingError` for
    an option of several lines."""
    # only our own words hold variables of the shell: all others are quoted
    meeting = [f'"{word}"' if "$" in word else word for word in job.meeting(_HOST, _RUN_ID)]
    command = " ".join(["srun", shlex.join([*program, *job.command]), *meeting])
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Written by `drivetrain launch slurm`.",
            *(f"#SBATCH --{option}" for option in _options(job, seconds, grace, gpus)),
            *(f"#SBATCH --{_escaped(option)}" for option in options),
            "",
            "# Slurm may signal this shell, too: the run saves, and the lines below follow",
            "trap : TERM USR1",
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            command,
            "code=$?",
            f"# {EXIT_PREEMPTED}: saved before it was done; --resume auto resumes it",
            f'if [ "$code" -eq {EXIT_PREEMPTED} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _options(job: Job, seconds: float | None, grace: float, gpus: int) -> Iterator[str]:
    yield f"job-name={job.name}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    if gpus:
        yield f"gpus-per-node={gpus}"
    if seconds is not None:
        yield f"time={max(1, round(seconds / 60))}"
        yield f"signal=TERM@{round(grace)}"
    yield "requeue"
    yield "open-mode=append"
    yield "output=%x-%j.log"


def _escaped(option: str) -> str:
    """Escape an option for a line of `#SBATCH`, where a space or a `#` would end it. A backslash
    there escapes the next character, also within quotes."""
    if "\n" in option or "\0" in option:
        raise SettingError(f"--sbatch {option!r:.200}: an option of sbatch must be on one line")
    return re.sub(r"[^\w@%+=:,./-]", r"\\\g<0>", option)
