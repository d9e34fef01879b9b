"""`drivetrain launch`: writes the job of a training for a scheduler, and submits it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import AsJson, debuggable, print_json
from .train import parse_arguments

__all__ = ["app"]

app = typer.Typer()
launch = typer.Typer(
    no_args_is_help=True,
    help="Write the job for a scheduler (and submit it with --submit). A job that is started again "
    "resumes from its newest checkpoint.",
)
app.add_typer(launch, name="launch")

Arguments = Annotated[
    list[str],
    typer.Argument(metavar="-- TRAIN-ARGUMENTS", help="Those of `drivetrain train`, with --out."),
]
Name = Annotated[
    str | None,
    typer.Option(help="The job's name; by default the last part of --out.", show_default=False),
]
Nodes = Annotated[int, typer.Option(min=1, help="Machines.")]
Nproc = Annotated[int, typer.Option(min=1, help="Processes on each.")]
File = Annotated[
    Path | None,
    typer.Option(help="The file to write; by default named after the job.", show_default=False),
]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the job, too.")]
Grace = Annotated[
    str, typer.Option(metavar="TIME", help="For the last save, before the job is killed.")
]


def _end(path: Path, text: str, command: list[str], submitted: bool, json: bool) -> None:
    """Write the file, submit it if that is requested, and print what was done."""
    from ...kernel.errors import printable
    from ..jobs.job import submit, write

    write(path, text)
    answer = submit(command) if submitted else None
    if json:
        print_json({"file": str(path), "submit": command, "answer": answer})
    elif answer is not None:
        typer.echo(printable(f"{path} was submitted: {answer}"))
    else:
        typer.echo(printable(f"written to {path}; submit it with: {shlex.join(command)}"))


@launch.command(
    epilog="[bold]Examples[/]\n\n"
    "drivetrain launch slurm -- my.py --out runs/a\n\n"
    "drivetrain launch slurm --nodes 4 --nproc 8 --gpus 8 --time 4h --submit -- my.py --backend "
    "fsdp --out runs/a\n\n"
    "drivetrain launch slurm --sbatch partition=large --sbatch cpus-per-task=16 -- my.py --out "
    "runs/a\n\n"
    "[bold]From Python[/]: drivetrain.cli.jobs.slurm.script"
)
@debuggable
def slurm(
    arguments: Arguments,
    nodes: Nodes = 1,
    nproc: Nproc = 1,
    gpus: Annotated[int, typer.Option(min=0, help="On each machine.")] = 0,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="The time limit, such as 4h.", show_default=False),
    ] = None,
    grace: Grace = "2m",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Another option of sbatch. Repeatable."),
    ] = None,
    name: Name = None,
    file: File = None,
    submit: Submit = False,
    json: AsJson = False,
) -> None:
    """Write an sbatch script. Signalled before its time limit, the run saves, and the job is
    requeued (exit code 75)."""
    from ..jobs.job import as_argument, job_of
    from ..jobs.slurm import script
    from ..process.deadline import parse_duration
    from ..process.program import program

    job = job_of(arguments, parse_arguments(arguments), name, nodes, nproc, gpus=gpus > 0)
    text = script(
        job,
        program(),
        seconds=None if time is None else parse_duration(time, "--time"),
        grace=parse_duration(grace, "--grace"),
        gpus=gpus,
        options=sbatch or (),
    )
    path = file or Path(f"{job.name}.sbatch")
    _end(path, text, ["sbatch", as_argument(path)], submit, json)


@launch.command(
    epilog="[bold]Examples[/]\n\n"
    "drivetrain launch kubernetes --image registry/my:1 -- my.py --out s3://bucket/a\n\n"
    "drivetrain launch kubernetes --image registry/my:1 --nodes 4 --nproc 8 --gpus 8 --claim "
    "runs:/runs --submit -- my.py --backend fsdp --out /runs/a\n\n"
    "[bold]From Python[/]: drivetrain.cli.jobs.kubernetes.manifest"
)
@debuggable
def kubernetes(
    arguments: Arguments,
    image: Annotated[str, typer.Option(help="A container image with drivetrain and the recipe.")],
    nodes: Nodes = 1,
    nproc: Nproc = 1,
    gpus: Annotated[int, typer.Option(min=0, help="On each machine.")] = 0,
    claim: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:/PATH",
            help="A volume claim, and where it is mounted; it holds --out.",
            show_default=False,
        ),
    ] = None,
    grace: Grace = "10m",
    max_restarts: Annotated[int, typer.Option(min=0, help="After failures.")] = 3,
    name: Name = None,
    file: File = None,
    submit: Submit = False,
    json: AsJson = False,
) -> None:
    """Write a JobSet. Interrupted pods (exit code 75) are replaced, failed ones up to
    --max-restarts times."""
    from ..jobs.job import as_argument, job_of
    from ..jobs.kubernetes import manifest, to_yaml
    from ..process.deadline import parse_duration

    job = job_of(
        arguments, parse_arguments(arguments), name, nodes, nproc, gpus=gpus > 0, here=False
    )
    seconds = parse_duration(grace, "--grace")
    made: dict[str, Any] = manifest(
        job, image, gpus=gpus, claim=claim, grace=seconds, max_restarts=max_restarts
    )
    path = file or Path(f"{job.name}.yaml")
    _end(path, to_yaml(made), ["kubectl", "apply", "-f", as_argument(path)], submit, json)


@launch.command(
    epilog="[bold]Examples[/]\n\n"
    "drivetrain launch ray --workers 2 -- my.py --backend ddp --out /shared/a\n\n"
    "drivetrain launch ray --workers 16 --gpus --submit -- my.py --backend fsdp --out s3://b/a\n\n"
    "[bold]From Python[/]: drivetrain.cli.jobs.ray_workers.train"
)
@debuggable
def ray(
    arguments: Arguments,
    workers: Annotated[int, typer.Option(min=1, help="Processes, on all machines.")] = 1,
    gpus: Annotated[bool, typer.Option("--gpus", help="One for each worker.")] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Of all workers.")] = 3,
    name: Name = None,
    file: File = None,
    submit: Submit = False,
    json: AsJson = False,
) -> None:
    """Write a Python file for Ray Train. When a worker is lost, all are restarted and resume from
    the newest checkpoint."""
    from ..jobs.job import job_of
    from ..jobs.ray import script, shell_word

    job = job_of(arguments, parse_arguments(arguments), name, 1, workers, gpus=gpus)
    path = file or Path(f"{job.name}_ray.py")
    command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", shell_word(path)]
    text = script(job, gpus=int(gpus), max_restarts=max_restarts)
    _end(path, text, command, submit, json)
