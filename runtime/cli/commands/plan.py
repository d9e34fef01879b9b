"""`drivetrain backends`, `explain` and `schema`: before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AnyBackend, AsJson, ConfigFiles, Set, debuggable, print_json

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain backends\n\ndrivetrain backends --json\n\n"
    "[bold]From Python[/]: drivetrain.kernel.registry.known_backends and find_driver"
)
@debuggable
def backends(json: AsJson = False) -> None:
    """All known drivers: usable here or not, why not, and how to install what is missing."""
    from ..backends import backend_records, show_backends
    from ..tables import open_console

    records = backend_records()
    if json:
        print_json(records)
    else:
        show_backends(records, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain explain my.py --backend fsdp --nproc 8\n\n"
    "drivetrain explain my.py --all --nproc 2 --set optimizer.name=torch.optim.SGD\n\n"
    "[bold]From Python[/]: drivetrain.cli.explain.explain"
)
@debuggable
def explain(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file; by default the small GPT.", show_default=False),
    ] = None,
    backend: AnyBackend = None,
    every: Annotated[bool, typer.Option("--all", help="All drivers, side by side.")] = False,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to plan for; none is started.")] = 1,
    config: ConfigFiles = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Show what a run would do: each value and its source, what is wrapped, tied, cast and
    sharded, and the memory that it would take."""
    from ..config_files import read_config_files
    from ..explain import explain, show_explanation
    from ..resolve_settings import parse_pairs
    from ..tables import open_console

    files = read_config_files(config or ())
    names = None if every else [backend or files.backend or "auto"]
    layers = [*files.layers, parse_pairs(set_ or (), {})]
    records = explain(recipe or files.recipe, names, layers, nproc)
    if json:
        print_json(records)
    else:
        show_explanation(records, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain schema > drivetrain.schema.json\n\n"
    "drivetrain schema my.py > my.schema.json   (with the recipe's configuration)\n\n"
    "Then, as the first line of run.toml: [bold]#:schema ./my.schema.json[/]\n\n"
    "[bold]From Python[/]: drivetrain.cli.schema.schema"
)
@debuggable
def schema(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file, to add its configuration.", show_default=False),
    ] = None,
) -> None:
    """The JSON schema of the files that --config takes, for editors: all settings, and the options
    of all drivers that are installed."""
    from ..schema import schema

    print_json(schema(recipe))
