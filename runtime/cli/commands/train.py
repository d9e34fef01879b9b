"""`drivetrain train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import ConfigFiles, Set, debuggable

__all__ = ["app"]

app = typer.Typer()

_TORCHRUN = "Handed to torchrun"
_Torchrun = Annotated[str | None, typer.Option(rich_help_panel=_TORCHRUN)]

TRAIN_EPILOG = """[bold]Examples[/]

drivetrain train

drivetrain train my.py --set optimizer.lr=3e-4 --set recipe.width=256 --steps 1000

drivetrain train my.py --backend ddp --nproc 8 --out runs/first

drivetrain train my.py --config base.toml --config large.toml --set seed=1

drivetrain train --resume runs/first --steps 2000

drivetrain train my.py --out runs/first --resume auto   (the line for a job that is restarted)

drivetrain train my.py --nproc 8 --nnodes 2 --node-rank 0 --master-addr host1 --out runs/big

Under torchrun, or srun with one task a device, leave --nproc out: ranks notice their launcher.

[bold]Exit codes[/]: 0 done; 1 failed; 2 the request cannot be carried out; 75 asked to stop by a
signal, saved, resume it.

[bold]From Python[/]: drivetrain.fit
"""


@app.command(epilog=TRAIN_EPILOG)
@debuggable
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="A Python file that defines `recipe`. By default a small GPT on Python's own "
            "source, or the recipe of the run that is resumed.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            "-b",
            help="The driver, or auto for the best usable one; see `drivetrain backends`. By "
            "default auto, or that of the run that is resumed.",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    config: ConfigFiles = None,
    set_: Set = None,
    steps: Annotated[int | None, typer.Option(help="Short for --set steps=N.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Short for --set epochs=X; lifts the recipe's steps.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=N.")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|URL",
            help="The run folder: metrics, report, configuration, checkpoints. By default "
            "runs/<recipe>-<time>, or the folder of the run that is resumed. At a URL, such as "
            "s3://bucket/run, the checkpoints; the rest is written to runs/ and copied there.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH|URL",
            help="Go on from a run folder or a checkpoint; auto: from the newest checkpoint in "
            "--out, or anew when there is none. Without a recipe, the resumed run's recipe and "
            "--set values are used.",
        ),
    ] = None,
    stop_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Save and stop after so long, counted from this command: 55m, 1h30m, or seconds. "
            "The exit code is 75.",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Send the figures to tensorboard, wandb, mlflow or trackio, too; a resumed run "
            "goes on with its curve, by default where it was tracked before (none: no more). "
            "Repeatable.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:END",
            help="Profile these steps (10:13 is 10, 11 and 12): a trace of each rank in profile/ "
            "of the run folder, for ui.perfetto.dev, and the costliest operations in the log.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON an event, and nothing else.")
    ] = False,
    nnodes: Annotated[
        str | None,
        typer.Option(help="Machines, or MIN:MAX.", rich_help_panel=_TORCHRUN),
    ] = None,
    node_rank: _Torchrun = None,
    master_addr: _Torchrun = None,
    master_port: _Torchrun = None,
    rdzv_backend: _Torchrun = None,
    rdzv_endpoint: _Torchrun = None,
    rdzv_id: _Torchrun = None,
    rdzv_conf: _Torchrun = None,
    local_addr: _Torchrun = None,
    max_restarts: _Torchrun = None,
    monitor_interval: _Torchrun = None,
) -> None:
    """Train a recipe; without one, a small GPT on the source of Python's standard library."""
    from ...kernel.paths import place
    from ...trainer.profiler import parse_steps
    from ..config_files import read_config_files
    from ..launch import Launch
    from ..resolve_settings import parse_pairs
    from ..train import TrainRequest
    from ..train import train as run

    torchrun = {
        "node-rank": node_rank,
        "master-addr": master_addr,
        "master-port": master_port,
        "rdzv-backend": rdzv_backend,
        "rdzv-endpoint": rdzv_endpoint,
        "rdzv-id": rdzv_id,
        "rdzv-conf": rdzv_conf,
        "local-addr": local_addr,
        "max-restarts": max_restarts,
        "monitor-interval": monitor_interval,
    }
    given = {name: value for name, value in torchrun.items() if value is not None}
    request = TrainRequest(
        recipe=recipe,
        backend=backend,
        files=read_config_files(config or ()),
        given=parse_pairs(set_ or (), {"steps": steps, "epochs": epochs, "seed": seed}),
        out=None if out is None else place(out),
        resume=resume,
        launch=Launch(nproc, nnodes, given),
        track=track,
        profile=None if profile is None else parse_steps(profile),
        stop_after=stop_after,
        json=json,
    )
    raise typer.Exit(run(request))
