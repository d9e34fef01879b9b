"""Arguments, error messages and JSON output that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .completion import backends, keys

if TYPE_CHECKING:
    from ...kernel.recipe import Recipe
    from ...trainer.settings import Settings

__all__ = [
    "AnyBackend",
    "AsJson",
    "CheckpointPath",
    "ConfigFiles",
    "Nproc",
    "RunBackend",
    "RunNproc",
    "RunPath",
    "RunRecipe",
    "Set",
    "debuggable",
    "print_json",
    "resolved",
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
    typer.Option(
        "--backend",
        "-b",
        help="The driver; by default auto.",
        show_default=False,
        autocompletion=backends,
    ),
]
RunRecipe = Annotated[
    Path | None,
    typer.Argument(help="By default the recipe of the run.", show_default=False),
]
RunBackend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        help="The driver; by default that of the run.",
        show_default=False,
        autocompletion=backends,
    ),
]
RunNproc = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes on this machine; by default as many as the run had on this driver, or one.",
        show_default=False,
    ),
]
Nproc = Annotated[int, typer.Option(min=1, help="Processes on this machine.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting (optimizer.lr=3e-4), the recipe's configuration "
        "(recipe.width=256) or an option of the driver (backend.threads=2). Repeatable.",
        autocompletion=keys,
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


def resolved(
    recipe: Path | None, backend: str | None, config: list[Path] | None, set_: list[str] | None
) -> tuple[str, Recipe, Settings]:
    """Return the name of the driver, the recipe and the settings that are requested."""
    from ...registry import usable_driver
    from ..settings.config_files import requested
    from ..settings.recipe_file import DEFAULT_RECIPE, load_recipe_file
    from ..settings.resolve_settings import resolve

    options = requested(recipe, backend, config, set_)
    file = load_recipe_file(options.recipe or DEFAULT_RECIPE)
    driver = usable_driver(options.backend or "auto")
    found = resolve(file, driver, options.layers)
    return driver.name, file.build(found.config), found.settings


def print_json(value: object) -> None:
    """Print a value to stdout as indented JSON."""
    import json

    typer.echo(json.dumps(value, indent=1))


def debuggable(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--debug` to a command, and turn its errors into a message and an exit code."""

    @functools.wraps(command)
    def run(*, debug: bool, **arguments: Any) -> None:
        from ..process.failure import reporting_errors

        with reporting_errors(debug=debug):
            command(**arguments)

    last = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Debug
    )
    signature = inspect.signature(command, eval_str=True)
    parameters = [*signature.parameters.values(), last]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
