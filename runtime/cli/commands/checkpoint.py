"""`drivetrain checkpoint`: inspects, verifies, averages, exports and imports checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import AsJson, CheckpointPath, debuggable, print_json

__all__ = ["app"]

_Weights = Literal["present", "average"]

app = typer.Typer(
    name="checkpoint",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Inspect and verify checkpoints, and exchange weights with other libraries.",
)


@app.command(
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint inspect runs/first\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.CheckpointReader"
)
@debuggable
def inspect(path: CheckpointPath, json: AsJson = False) -> None:
    """Show which driver wrote a checkpoint, when, and the tensors in it, and which checkpoint of a
    run is the best; reads no tensor."""
    from ...kernel.paths import place
    from ...run.tables import open_console
    from ..report.checkpoints import inspect_named, show

    record = inspect_named(place(path))
    if json:
        print_json(record)
    else:
        show(record, open_console())


@app.command(
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint verify runs/first\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.CheckpointReader.verify"
)
@debuggable
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL", help="A checkpoint, or a run (all its checkpoints): folder or URL."
        ),
    ],
) -> None:
    """Read every byte and compare checksums; exit 1 and name each file that is damaged."""
    from ...kernel.errors import printable
    from ...kernel.paths import place
    from ...run.quoted import say
    from ..report.checkpoints import verify

    checkpoints, problems = verify(place(path))
    for problem in problems:
        say(problem, label="damaged:", style="bold red")
    if problems:
        raise typer.Exit(1)
    for found in checkpoints:
        typer.echo(printable(f"{found}: complete and unaltered"))


@app.command(
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint export runs/first exported/first\n\n"
    "drivetrain checkpoint export runs/first exported/average --weights average\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.export_weights"
)
@debuggable
def export(
    path: CheckpointPath,
    folder: Annotated[Path, typer.Argument(help="A new folder, for model.safetensors.")],
    weights: Annotated[
        _Weights, typer.Option(help="The weights, or the averages of a run with average.decay.")
    ] = "present",
) -> None:
    """Write the weights as whole tensors, in the layout that `from_pretrained` reads."""
    from ...checkpoint import export_weights
    from ...kernel.errors import printable
    from ...kernel.paths import place
    from ...run.run_folder import locate

    written = export_weights(locate(place(path)), folder, weights=weights)
    typer.echo(printable(f"weights written to {written}"))


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain checkpoint average runs/first --out runs/averaged\n\n"
    "drivetrain checkpoint average runs/a runs/b/checkpoints/checkpoint-000900 --out runs/both\n\n"
    "drivetrain evaluate runs/averaged --recipe my.py\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.average_weights"
)
@debuggable
def average(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Checkpoints, or runs (all their checkpoints): folder or URL.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            metavar="RUN", help="The run folder, or URL, to put a checkpoint of step 0 in."
        ),
    ],
) -> None:
    """Make a checkpoint of the mean of several checkpoints' weights, a tensor at a time."""
    from ...checkpoint import CHECKPOINTS, average_weights
    from ...kernel.errors import printable
    from ...kernel.paths import place
    from ..report.checkpoints import all_of

    chosen = [each for path in paths for each in all_of(place(path))]
    target = average_weights(chosen, place(out) / CHECKPOINTS)
    typer.echo(printable(f"the mean of {len(chosen)} checkpoints written to {target}"))


@app.command(
    "import",
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint import exported/first runs/second\n\n"
    "drivetrain train my.py --resume runs/second/checkpoints --out runs/second-trained\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.import_weights",
)
@debuggable
def import_(
    folder: Annotated[Path, typer.Argument(help="A folder with safetensors weights.")],
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run folder, or URL, to put a checkpoint of step 0 in."
        ),
    ],
) -> None:
    """Make a checkpoint from safetensors weights; any driver can start from it."""
    from ...checkpoint import CHECKPOINTS, import_weights
    from ...kernel.errors import printable
    from ...kernel.paths import place

    target = import_weights(folder, place(run) / CHECKPOINTS)
    typer.echo(printable(f"checkpoint written to {target}"))
