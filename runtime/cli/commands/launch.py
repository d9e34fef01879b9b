"""`drivetrain launch`: a training is handed to a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import AsJson, debuggable, print_json

__all__ = ["app"]

app = typer.Typer()
launch = typer.Typer(
    no_args_is_help=True,
    help="Write the job for a scheduler (and hand it over with --submit): started again, it goes "
    "on from its newest checkpoint.",
)
app.add_typer(launch, name="launch")

Arguments = Annotated[
    list[str],
    typer.Argument(metavar="-- TRAIN-ARGUMENTS", help="Those of `drivetrain train`, with --out."),
]
Name = Annotated[
    str | None,
    typer.Option(help="Of the job; by default the last part of --out.", show_default=False),
]
Nodes = Annotated[int, typer.Option(min=1, help="Machines.")]
Nproc = Annotated[int, typer.Option(min=1, help="Processes on each.")]
File = Annotated[
    Path | None,
    typer.Option(help="What is written; by default after the job's name.", show_default=False),
]
Submit = Annotated[bool, typer.Option("--submit", help="Hand the job over, too.")]
Grace = Annotated[
    str, typer.Option(metavar="TIME", help="For the last save, before the job is ended.")
]


def _end(path: Path, text: str, command: list[str], submitted: bool, json: bool) -> None:
    """Write the file and hand it over, and tell."""
    from ..jobs.job import submit, write

    write(path, text)
    answer = submit(command) if submitted else None
    if json:
        print_json({"file": str(path), "submit": command, "answer": answer})
    elif answer is not None:
        typer.echo(f"{path} was handed over: {answer}")
    else:
        typer.echo(f"written to {path}; hand it over with: {' '.join(command)}")


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
    """An sbatch script: signalled before its time is over, the run saves, and is put back into the
    queue (exit code 75)."""
    from ..deadline import parse_duration
    from ..jobs.job import job_of
    from ..jobs.slurm import script
    from ..program import program

    job = job_of(arguments, name, nodes, nproc)
    text = script(
        job,
        program(),
        seconds=None if time is None else parse_duration(time, "--time"),
        grace=parse_duration(grace, "--grace"),
        gpus=gpus,
        options=sbatch or (),
    )
    path = file or Path(f"{job.name}.sbatch")
    _end(path, text, ["sbatch", str(path)], submit, json)


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
    image: Annotated[str, typer.Option(help="With drivetrain, and the recipe, in it.")],
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
    """A JobSet: pods that were interrupted (exit code 75) are made anew, those that failed up to
    --max-restarts times."""
    from ..deadline import parse_duration
    from ..jobs.job import job_of
    from ..jobs.kubernetes import manifest, to_yaml

    job = job_of(arguments, name, nodes, nproc)
    seconds = parse_duration(grace, "--grace")
    made: dict[str, Any] = manifest(
        job, image, gpus=gpus, claim=claim, grace=seconds, max_restarts=max_restarts
    )
    path = file or Path(f"{job.name}.yaml")
    _end(path, to_yaml(made), ["kubectl", "apply", "-f", str(path)], submit, json)


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
    """A Python file for Ray Train: when a worker is lost, all are started anew, and go on from the
    newest checkpoint."""
    from ..jobs.job import job_of
    from ..jobs.ray import script

    job = job_of(arguments, name, 1, workers)
    path = file or Path(f"{job.name}_ray.py")
    command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", str(path)]
    text = script(job, gpus=int(gpus), max_restarts=max_restarts)
    _end(path, text, command, submit, json)
