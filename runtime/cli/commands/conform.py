"""`drivetrain conform`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import debuggable

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain conform --backend cpu\n\n"
    "drivetrain conform --backend ddp --nproc 2 -k gradient --report conformance\n\n"
    "drivetrain conform --backend mine --backend-set threads=2 --peer cpu --peer ddp:2\n\n"
    "drivetrain conform --backend mine -- -x --tb=short   (behind --, what pytest takes)\n\n"
    "[bold]Exit codes[/]: 0 all laws are kept; 1 some are not; 5 nothing ran; 69 the driver cannot "
    "run here.\n\n[bold]From Python[/]: drivetrain.conformance.cases"
)
@debuggable
def conform(
    backend: Annotated[str, typer.Option(help="The driver to prove.")],
    nproc: Annotated[int | None, typer.Option(help="Ranks; by default the suite chooses.")] = None,
    backend_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the driver. Repeatable."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:N]",
            help="A driver to exchange checkpoints with, in N processes; by default the driver "
            "itself in other numbers of processes. Repeatable.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A folder for the report, in JSON and HTML.")
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", metavar="EXPR", help="Only cases that match, as in pytest.")
    ] = None,
    allow_unavailable: Annotated[
        bool, typer.Option("--allow-unavailable", help="A driver that cannot run here is no error.")
    ] = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- PYTEST...]", show_default=False)
    ] = None,
) -> None:
    """Prove that a driver keeps the laws of the contract; needs pytest. How long it takes is said
    at its start."""
    from ..conform import conform

    options = {
        "--nproc": nproc,
        "--backend-set": backend_set,
        "--peer": peer,
        "--report": report,
    }
    more = [] if select is None else ["-k", select]
    flags = {"--allow-unavailable": allow_unavailable}
    raise typer.Exit(conform(backend, options, flags, [*more, *(arguments or ())]))
