"""`drivetrain report` and `watch`: runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Debug

__all__ = ["app"]

app = typer.Typer()

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain report runs/a runs/b --out compared.html\n\n"
    "drivetrain report runs/a   (renews its report.html)\n\n"
    "[bold]From Python[/]: drivetrain.cli.compare.page"
)
def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; by default report.html, in the folder of a single run.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """One page that compares runs: where they stand, their curves, and the settings that differ."""
    from ..failure import told

    with told(debug=debug):
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
def watch(
    runs: Runs,
    host: Annotated[str, typer.Option(help="Who may ask: this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between looks.")] = 5.0,
    debug: Debug = False,
) -> None:
    """Serve the page of runs while they go on, until Ctrl-C; it renews itself in the browser."""
    from ..failure import told

    with told(debug=debug):
        from ..compare import page, read_run
        from ..serve import server

        page([read_run(run) for run in runs])  # raises
        with server(lambda: page([read_run(run) for run in runs]), host, port, every) as serving:
            typer.echo(f"http://{host}:{serving.server_port}/  (Ctrl-C ends)")
            try:
                serving.serve_forever()
            except KeyboardInterrupt:
                typer.echo("ended")
