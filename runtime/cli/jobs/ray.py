"""A Python file for Ray (https://docs.ray.io), which trains by Ray Train's workers."""

from __future__ import annotations

from .job import Job

__all__ = ["script"]


def script(job: Job, *, gpus: int, max_restarts: int) -> str:
    """The text of it. Workers are the job's processes on all its nodes."""
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
