"""A Python file for Ray (https://docs.ray.io), which trains by Ray Train's workers."""

from __future__ import annotations

import re
from pathlib import Path

from ...kernel.errors import SettingError
from .job import Job, as_argument

__all__ = ["script", "shell_word"]


def shell_word(path: Path) -> str:
    """Return the path for the command of `ray job submit`: Ray joins that command without quotes,
    and a shell of the cluster runs it. Raises `SettingError`."""
    if not re.fullmatch(r"[\w@%+=:,./-]+", str(path)):
        raise SettingError(
            f"--file {str(path)!r}: a shell of the cluster would interpret this name; give one of "
            "letters, digits and - _ . /"
        )
    return as_argument(path)


def script(job: Job, *, gpus: int, max_restarts: int) -> str:
    """Return the text of the file. Its workers are the job's processes on all nodes."""
    arguments = "".join(f"            {word!r},\n" for word in job.arguments)
    return f'''"""Written by `drivetrain launch ray`. On a machine of the cluster: python FILE"""

from drivetrain.cli.jobs.ray_workers import train

if __name__ == "__main__":
    train(
        [
{arguments}        ],
        name={job.name!r},
        workers={job.nodes * job.nproc},
        gpus={gpus},
        max_restarts={max_restarts},
    )
'''
