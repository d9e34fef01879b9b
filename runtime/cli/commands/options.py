"""What several commands have in common: arguments, how errors are told, JSON."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "AnyBackend",
    "AsJson",
    "CheckpointPath",
    "ConfigFiles",
    "Nproc",
    "RunPath",
    "Set",
    "debuggable",
    "print_json",
]

_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH|URL",
        help="A checkpoint, or a run (its newest complete checkpoint): a folder, or a URL such as "
        "s3://bucket/run.",
    ),
]
RunPath = Annotated[
    str, typer.Argument(metavar="RUN", help="A run folder, a checkpoint, or a URL of one.")
]
AnyBackend = Annotated[
    str | None,
    typer.Option("--backend", "-b", help="The driver; by default auto.", show_default=False),
]
Nproc = Annotated[int, typer.Option(min=1, help="Processes on this machine.")]
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


def debuggable(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--debug`, its errors turned into a message and an exit code."""

    @functools.wraps(command)
    def run(*, debug: bool, **arguments: Any) -> None:
        from ..failure import told

        with told(debug=debug):
            command(**arguments)

    last = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Debug
    )
    signature = inspect.signature(command, eval_str=True)
    parameters = [*signature.parameters.values(), last]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
