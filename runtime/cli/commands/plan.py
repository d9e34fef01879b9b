"""`drivetrain backends`, `explain`, `plan`, `summary` and `schema`: before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AnyBackend, AsJson, ConfigFiles, Set, debuggable, print_json, resolved

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain backends\n\ndrivetrain backends --json\n\n"
    "[bold]From Python[/]: drivetrain.registry.known_backends and find_driver"
)
@debuggable
def backends(json: AsJson = False) -> None:
    """List all known drivers: usable here or not, why not, and how to install what is missing."""
    from ...run.tables import open_console
    from ..report.backends import backend_records, show_backends

    records = backend_records()
    if json:
        print_json(records)
    else:
        show_backends(records, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain explain my.py --backend fsdp --nproc 8\n\n"
    "drivetrain explain my.py --all --nproc 2 --set optimizer.name=torch.optim.SGD\n\n"
    "[bold]From Python[/]: drivetrain.cli.settings.explain.explain"
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
    from ...run.tables import open_console
    from ..settings.config_files import requested
    from ..settings.explain import explain, show_explanation

    options = requested(recipe, backend, config, set_)
    names = None if every else [options.backend or "auto"]
    records = explain(options.recipe, names, options.layers, nproc)
    if json:
        print_json(records)
    else:
        show_explanation(records, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain plan my.py --world 8\n\n"
    "drivetrain plan my.py --world 64 --device h100 --memory 80GB --set precision=bf16\n\n"
    "drivetrain plan hf:config.json --world 64 --sequence 8192 --set global_batch=512\n\n"
    "drivetrain plan my.py --world 2 --calibrate this-machine.json\n\n"
    "[bold]From Python[/]: drivetrain.cli.settings.plan.plan"
)
@debuggable
def plan(
    world: Annotated[int, typer.Option(min=1, help="Ranks to plan for; none is started.")],
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="A recipe file, or hf:CONFIG.json, the configuration of a model of transformers; "
            "by default the small GPT.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="a100, h100, h200, or a file that describes another device; by default h100.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="In place of --device: measure this machine for less than a minute, write what "
            "is found to this new file, and plan for it.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of one rank, such as 80GB; by default the device's.", show_default=False
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", "-b", help="The driver; by default all of them.", show_default=False
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(min=1, help="Short for --set recipe.sequence, of hf:CONFIG.json."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of ways to show.")] = 20,
    config: ConfigFiles = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Compare all ways to place a run on ranks: the memory, what is sent, and the time of a step.
    Settings and options that are given are not varied. Needs no device."""
    from ...kernel.errors import UsageError
    from ...run.tables import open_console
    from ..report.looking import looking
    from ..settings.config_files import requested
    from ..settings.measured_device import measure_device
    from ..settings.plan import plan, show_plan

    of_model = [] if sequence is None else [f"recipe.sequence={sequence}"]
    options = requested(recipe, backend, config, [*(set_ or ()), *of_model])
    if calibrate is not None:
        if device is not None:
            raise UsageError("--calibrate measures a device, and --device names one: give one")
        typer.echo(measure_device(calibrate, world), err=True)
        device = str(calibrate)
    with looking("looking at ways to place the run") as progress:
        found = plan(
            options.recipe,
            options.backend,
            options.layers,
            world,
            device or "h100",
            memory,
            progress,
        )
    if json:
        print_json(found)
    else:
        show_plan(found, top, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain summary my.py\n\n"
    "drivetrain summary my.py --depth 5 --set recipe.width=64\n\n"
    "[bold]From Python[/]: drivetrain.cli.settings.summary.summarise"
)
@debuggable
def summary(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file; by default the small GPT.", show_default=False),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Names of modules have so many parts.")] = 3,
    config: ConfigFiles = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Show the model: each module, the shape of its output for one microbatch, its parameters, how
    many of them are trained, and their size."""
    from ...run.tables import open_console
    from ..settings.summary import show_summary, summarise, to_json

    _, built, settings = resolved(recipe, "cpu", config, set_)
    rows = summarise(built, settings, depth)
    if json:
        print_json(to_json(rows))
    else:
        show_summary(rows, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain schema > drivetrain.schema.json\n\n"
    "drivetrain schema my.py > my.schema.json   (with the recipe's configuration)\n\n"
    "Then, as the first line of run.toml: [bold]#:schema ./my.schema.json[/]\n\n"
    "[bold]From Python[/]: drivetrain.cli.settings.schema.schema"
)
@debuggable
def schema(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file, to add its configuration.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON schema of the files that --config takes, for editors: all settings, and the
    options of all drivers that are installed."""
    from ..settings.schema import schema

    print_json(schema(recipe))
