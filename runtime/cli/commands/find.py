"""`drivetrain find`: searches before a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .options import AnyBackend, AsJson, ConfigFiles, Set, debuggable, print_json, resolved

__all__ = ["app"]

app = typer.Typer()
find = typer.Typer(help="Search for a learning rate, or for the largest microbatch.")
app.add_typer(find, name="find")

_Recipe = Annotated[
    Path | None,
    typer.Argument(help="A recipe file; by default the small GPT.", show_default=False),
]


@find.command(
    "learning-rate",
    epilog="[bold]Examples[/]\n\ndrivetrain find learning-rate my.py\n\n"
    "drivetrain find learning-rate my.py --low 1e-5 --high 1 --steps 200\n\n"
    "[bold]From Python[/]: drivetrain.trainer.find.find_learning_rate",
)
@debuggable
def learning_rate(
    recipe: _Recipe = None,
    low: Annotated[float, typer.Option(help="The first rate.")] = 1e-7,
    high: Annotated[float, typer.Option(help="The last one.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps from the one to the other.")] = 100,
    backend: AnyBackend = None,
    config: ConfigFiles = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Train once while the learning rate rises, and suggest a tenth of the rate where the loss was
    least. Batches are those of the run, so that it holds for any number of processes. Nothing is
    kept."""
    from ...run.tables import open_console
    from ...trainer.find import find_learning_rate
    from ..report.find import show_learning_rate

    name, built, settings = resolved(recipe, backend, config, set_)
    found = find_learning_rate(built, settings, backend=name, low=low, high=high, steps=steps)
    if json:
        print_json(asdict(found))
    else:
        show_learning_rate(found, open_console())


@find.command(
    "micro-batch",
    epilog="[bold]Examples[/]\n\ndrivetrain find micro-batch my.py --backend ddp\n\n"
    "drivetrain find micro-batch my.py --set precision=bf16 --most 64\n\n"
    "[bold]From Python[/]: drivetrain.trainer.find.find_micro_batch",
)
@debuggable
def micro_batch(
    recipe: _Recipe = None,
    most: Annotated[int, typer.Option(min=1, help="The largest that is tried.")] = 4096,
    backend: AnyBackend = None,
    config: ConfigFiles = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Train three steps with microbatches of 1, 2, 4 and so on, until memory runs out; say how fast
    each is. Nothing is kept."""
    import sys

    from rich.console import Console

    from ...run.tables import open_console
    from ...trainer.find import find_micro_batch
    from ..report.find import show_micro_batches

    name, built, settings = resolved(recipe, backend, config, set_)
    console = Console(file=sys.stderr, highlight=False) if json else open_console()
    found = find_micro_batch(built, settings, backend=name, most=most)
    tried = show_micro_batches(found, console)
    if json:
        print_json(tried)
