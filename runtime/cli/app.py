"""The command line, whose commands are in `commands`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from .commands import checkpoint, conform, data, find, launch, look, plan, train

__all__ = ["app"]

app = typer.Typer(
    name="drivetrain",
    help="Write the training once; choose the hardware with an argument; resume anywhere.",
    epilog="[bold]Start here:[/]  drivetrain train    (two minutes on a laptop, no download)",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"drivetrain {version('drivetrain')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


for each in (train, launch, plan, find, look, data, checkpoint, conform):
    app.add_typer(each.app)
