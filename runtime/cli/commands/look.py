"""`drivetrain evaluate`, `predict`, `replay`, `compare`, `report` and `watch`: commands on earlier
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    AnyBackend,
    AsJson,
    ConfigFiles,
    Nproc,
    RunBackend,
    RunNproc,
    RunPath,
    RunRecipe,
    Set,
    debuggable,
    print_json,
)

__all__ = ["app"]

app = typer.Typer()

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain report runs/a runs/b --out compared.html\n\n"
    "drivetrain report runs/a   (renews its report.html)\n\n"
    "[bold]From Python[/]: drivetrain.cli.report.compare.page"
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
    """Write one page that compares runs: their state, curves, and the settings that differ."""
    from ...checkpoint.storage.local import replace_text
    from ...kernel.errors import printable
    from ...run.run_folder import REPORT
    from ..report.compare import page, read_run

    path = out or Path(runs[0] if len(runs) == 1 else "", REPORT)
    found = [read_run(run) for run in runs]
    replace_text(path, page(found))
    typer.echo(printable(f"page written to {path}"))
    if skipped := sum(run.history.skipped + run.config.skipped for run in found):
        typer.echo(f"{skipped} lines or values that no run writes were left out")


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain watch runs/a\n\n"
    "drivetrain watch runs/a runs/b --port 8000\n\n"
    "On another machine: ssh -L 8000:localhost:8000 HOST, then http://localhost:8000\n\n"
    "[bold]From Python[/]: drivetrain.cli.report.serve.PageServer"
)
@debuggable
def watch(
    runs: Runs,
    host: Annotated[
        str, typer.Option(help="Where to serve; by default to this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between looks.")] = 5.0,
) -> None:
    """Serve the page of runs while they train, until Ctrl-C. It refreshes itself in the browser,
    and shows the time left."""
    from ..report.compare import RunReader, page
    from ..report.serve import PageServer, Served

    readers = [RunReader(run) for run in runs]
    served = Served(
        lambda: page([reader.read() for reader in readers], every),
        lambda: tuple(reader.changes() for reader in readers),
    )
    served.make()  # raises
    with PageServer(served, host, port, every) as serving:
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
    recipe: RunRecipe = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Each checkpoint as it comes, until the run has ended."),
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints, not the newest.")] = False,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Between two looks for another checkpoint.")
    ] = 10.0,
    backend: AnyBackend = None,
    nproc: Nproc = 1,
    config: ConfigFiles = None,
    set_: Set = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a result.")] = False,
) -> None:
    """Measure the evaluation data with a run's checkpoints, on any driver; the results join the
    run's metrics."""
    from ..settings.config_files import requested
    from ..training.evaluate import EvaluateRequest
    from ..training.evaluate import evaluate as measure

    request = EvaluateRequest(
        run=run,
        requested=requested(recipe, backend, config, set_),
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
    from ..settings.config_files import requested
    from ..training.predict import PredictRequest
    from ..training.predict import predict as write

    request = PredictRequest(
        run=run,
        requested=requested(recipe, backend, config, set_),
        out=out,
        data=data,
        padding=padding,
        nproc=nproc,
        json=json,
    )
    raise typer.Exit(write(request))


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain replay runs/a --step 200\n\n"
    "drivetrain replay runs/a --step 200 --backend cpu   (a run on GPUs)\n\n"
    "drivetrain replay runs/a --step 200 --against runs/b\n\n"
    "drivetrain replay runs/a --step 200 --dump step200\n\n"
    "[bold]Exit codes[/]: 0 equal; 1 different; 2 the step cannot be replayed.\n\n"
    "[bold]From Python[/]: drivetrain.cli.training.replay.replay"
)
@debuggable
def replay(
    run: RunPath,
    recipe: RunRecipe = None,
    *,
    step: Annotated[int, typer.Option(min=1, help="A step that the run has logged.")],
    backend: RunBackend = None,
    nproc: RunNproc = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Compare with the records of this run up to the step, and train nothing.",
            show_default=False,
        ),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the step's samples, losses of microbatches and norms to JSON files.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A new folder for the step's checkpoint. On the run's own driver it is compared "
            "with the run's checkpoint of this step.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFiles = None,
    set_: Set = None,
    json: AsJson = False,
) -> None:
    """Train a logged step again from the checkpoint before it, on any driver, and compare it with
    what the run recorded. Nothing is written to the run."""
    from ..settings.config_files import requested
    from ..training.replay import ReplayRequest
    from ..training.replay import replay as train_again

    request = ReplayRequest(
        run=run,
        requested=requested(recipe, backend, config, set_),
        nproc=nproc or 1,
        step=step,
        against=against,
        dump=dump,
        save=save,
        json=json,
    )
    raise typer.Exit(train_again(request, nproc))


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain witness runs/a\n\n"
    "drivetrain witness runs/a --follow --backend cpu --every 10   (beside a run on GPUs)\n\n"
    "[bold]Exit codes[/]: 0 all equal; 1 a stretch is different; 2 none could be judged.\n\n"
    "[bold]From Python[/]: drivetrain.cli.training.witness.witness"
)
@debuggable
def witness(
    run: RunPath,
    recipe: RunRecipe = None,
    *,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Each checkpoint as it comes, until the run has ended."),
    ] = False,
    every: Annotated[int, typer.Option(min=1, help="Judge every n-th checkpoint.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Between two looks for another checkpoint.")
    ] = 10.0,
    backend: RunBackend = None,
    nproc: RunNproc = None,
    config: ConfigFiles = None,
    set_: Set = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON a checkpoint.")
    ] = False,
) -> None:
    """Train the steps before each checkpoint of a run again, on any driver, and compare them with
    what the run recorded and saved. Nothing is written to the run."""
    from ..training.witness import WitnessRequest
    from ..training.witness import witness as judge

    words = [] if recipe is None else [str(recipe)]
    words += [] if backend is None else [f"--backend={backend}"]
    words += [] if nproc is None else [f"--nproc={nproc}"]
    words += [f"--config={file}" for file in config or ()]
    words += [f"--set={pair}" for pair in set_ or ()]
    request = WitnessRequest(
        run=run, replay=words, every=every, follow=seconds if follow else None, json=json
    )
    raise typer.Exit(judge(request))


@app.command(
    epilog="[bold]Example[/]\n\ndrivetrain compare runs/a runs/b\n\n"
    "[bold]Exit codes[/]: 0 equal; 1 different; 2 the runs cannot be compared.\n\n"
    "[bold]From Python[/]: drivetrain.run.parted.compare_runs"
)
@debuggable
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run folder.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run folder.")],
    json: AsJson = False,
) -> None:
    """Find the first step at which two runs part, and the settings and versions that differ."""
    from ...kernel.errors import printable
    from ...run.parted import compare_runs

    found = compare_runs(first, second)
    if json:
        print_json(found.to_json())
    else:
        typer.echo(printable("\n".join(found.lines())))
    raise typer.Exit(1 if found.differences else 0)
