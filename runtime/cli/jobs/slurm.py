"""A batch script for Slurm, which puts the job back into the queue when it was interrupted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ...kernel.errors import EXIT_PREEMPTED
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
    """The text of it. `seconds` is the time limit, `grace` the time that a save may take before it;
    `options` are sbatch's, without the dashes."""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Written by `drivetrain launch slurm`.",
            *(f"#SBATCH --{option}" for option in _options(job, seconds, grace, gpus)),
            *(f"#SBATCH --{option}" for option in options),
            "",
            "# Slurm may signal this shell, too: what it started saves, and then it goes on below",
            "trap : TERM USR1",
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun {_quoted([*program, *job.command(_HOST, _RUN_ID)])}",
            "code=$?",
            f"# {EXIT_PREEMPTED}: saved before it was done; --resume auto goes on",
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


def _quoted(words: Sequence[str]) -> str:
    """For the shell, which fills in what it knows of the job."""
    return " ".join(f'"{word}"' if _ours(word) else shlex.quote(word) for word in words)


def _ours(word: str) -> bool:
    return word.startswith(f"{_HOST}:") or word == _RUN_ID
