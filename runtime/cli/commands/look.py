"""`drivetrain evaluate`, `predict`, `report` and `watch`: runs are measured and looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AnyBackend, ConfigFiles, Nproc, RunPath, Set, debuggable

__all__ = ["app"]

app = typer.Typer()

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain report runs/a runs/b --out compared.html\n\n"
    "drivetrain report runs/a   (renews its report.html)\n\n"
    "[bold]From Python[/]: drivetrain.cli.compare.page"
)
@debuggable
def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; by default report.html, in the folder of a single run.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """One page that compares runs: where they stand, their curves, and the settings that differ."""
    from ...checkpoint.storage.local import replace_text
    from ...kernel.errors import printable
    from ..compare import page, read_run
    from ..run_folder import REPORT

    path = out or Path(runs[0] if len(runs) == 1 else "", REPORT)
    replace_text(path, page([read_run(run) for run in runs]))
    typer.echo(printable(f"page written to {path}"))


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain watch runs/a\n\n"
    "drivetrain watch runs/a runs/b --port 8000\n\n"
    "On another machine: ssh -L 8000:localhost:8000 HOST, then http://localhost:8000\n\n"
    "[bold]From Python[/]: drivetrain.cli.serve.server"
)
@debuggable
def watch(
    runs: Runs,
    host: Annotated[str, typer.Option(help="Who may ask: this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between looks.")] = 5.0,
) -> None:
    """Serve the page of runs while they go on, until Ctrl-C; it renews itself in the browser."""
    from ..compare import page, read_run
    from ..serve import server

    page([read_run(run) for run in runs])  # raises
    with server(lambda: page([read_run(run) for run in runs]), host, port, every) as serving:
        typer.echo(f"http://{host}:{serving.server_port}/  (Ctrl-C ends)")
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended")


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain evaluate runs/a\n\n"
    "drivetrain evaluate runs/a --follow --backend cpu   (beside a run on GPUs)\n\n"
    "drivetrain evaluate runs/a other_data.py --all --nproc 2 --backend ddp --json\n\n"
    "[bold]From Python[/]: drivetrain.evaluate"
)
@debuggable
def evaluate(
    run: RunPath,
    recipe: Annotated[
        Path | None,
        typer.Argument(help="By default the recipe of the run.", show_default=False),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Each checkpoint as it comes, until the run has ended."),
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints, not the newest.")] = False,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Between looks for another checkpoint.")
    ] = 10.0,
    backend: AnyBackend = None,
    nproc: Nproc = 1,
    config: ConfigFiles = None,
    set_: Set = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a result.")] = False,
) -> None:
    """Measure the evaluation data with a run's checkpoints, on any driver; the results join the
    run's metrics."""
    from ..config_files import read_config_files
    from ..evaluate import EvaluateRequest
    from ..evaluate import evaluate as measure
    from ..resolve_settings import parse_pairs

    request = EvaluateRequest(
        run=run,
        recipe=recipe,
        backend=backend,
        files=read_config_files(config or ()),
        given=parse_pairs(set_ or (), {}),
        nproc=nproc,
        every=every,
        follow=seconds if follow else None,
        json=json,
    )
    raise typer.Exit(measure(request))


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain predict runs/a --out predictions.parquet\n\n"
    "drivetrain predict runs/a other_data.py --data test --out test.jsonl --nproc 2\n\n"
    "[bold]From Python[/]: drivetrain.predict"
)
@debuggable
def predict(
    run: RunPath,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="By default the recipe of the run. Its `predict(module, batch)` gives the "
            "outputs, or module(batch) does.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="predictions.parquet, or .jsonl; replaced when all is there."),
    ] = Path("predictions.parquet"),
    data: Annotated[
        str | None,
        typer.Option(
            help="One of the recipe's eval_data, or train_data; by default its only eval_data.",
            show_default=False,
        ),
    ] = None,
    padding: Annotated[float, typer.Option(help="Fills rows that are shorter than others.")] = -100,
    backend: AnyBackend = None,
    nproc: Nproc = 1,
    config: ConfigFiles = None,
    set_: Set = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a run's outputs for each sample of data, in their order, on any driver."""
    from ..config_files import read_config_files
    from ..predict import PredictRequest
    from ..predict import predict as write
    from ..resolve_settings import parse_pairs

    request = PredictRequest(
        run=run,
        recipe=recipe,
        out=out,
        data=data,
        padding=padding,
        backend=backend,
        files=read_config_files(config or ()),
        given=parse_pairs(set_ or (), {}),
        nproc=nproc,
        json=json,
    )
    raise typer.Exit(write(request))
