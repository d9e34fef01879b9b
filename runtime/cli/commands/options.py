"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "CheckpointPath", "ConfigFiles", "Debug", "Set", "print_json"]

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH|URL",
        help="A checkpoint, or a run (its newest complete checkpoint): a folder, or a URL such as "
        "s3://bucket/run.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting (optimizer.lr=3e-4), the recipe's configuration "
        "(recipe.width=256) or an option of the driver (backend.threads=2). Repeatable.",
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML, YAML or JSON with the keys of --set, or the config.json of a run. "
        "Repeatable: later files win, and --set over all of them. See `drivetrain schema`.",
    ),
]


def print_json(value: object) -> None:
    """To stdout, indented."""
    import json

    typer.echo(json.dumps(value, indent=1))
