"""The command line: each command stands in `commands`."""

from __future__ import annotations

import typer

from .commands import checkpoint, conform, data, launch, look, plan, train

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
for commands in (train.app, launch.app, plan.app, look.app, data.app, checkpoint.app, conform.app):
    app.add_typer(commands)
