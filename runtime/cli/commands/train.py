"""`drivetrain train`: its options."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings.train_options import TORCHRUN
from .completion import backends
from .options import ConfigFiles, Set, debuggable

__all__ = ["app", "parse_arguments"]

app = typer.Typer()

_DEBUGGING, _TORCHRUN = "To find mistakes", "Handed to torchrun"
_Torchrun = Annotated[str | None, typer.Option(rich_help_panel=_TORCHRUN)]

TRAIN_EPILOG = """[bold]Examples[/]

drivetrain train

drivetrain train my.py --set optimizer.lr=3e-4 --set recipe.width=256 --steps 1000

drivetrain train my.py --backend ddp --nproc 8 --out runs/first

drivetrain train my.py --config base.toml --config large.toml --set seed=1

drivetrain train --resume runs/first --steps 2000

drivetrain train my.py --out runs/first --resume auto   (the line for a job that is restarted)

drivetrain train my.py --fast   (all parts of a run in seconds)

drivetrain train my.py --nproc 8 --nnodes 2 --node-rank 0 --master-addr host1 --out runs/big

Under torchrun, or srun with one task a device, leave --nproc out: ranks notice their launcher.

[bold]Exit codes[/]: 0 done; 1 failed; 2 the request cannot be carried out; 3 trained
and saved, then an evaluation or an observer failed; 75 asked to stop by a signal, saved, resume it.

[bold]From Python[/]: drivetrain.fit
"""


def _with_torchrun(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each of `TORCHRUN` to a command, in place of its `**torchrun`."""
    signature = inspect.signature(command, eval_str=True)
    *parameters, _ = signature.parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Torchrun)
        for name in TORCHRUN
    ]
    replaced = signature.replace(parameters=[*parameters, *options])
    command.__signature__ = replaced  # type: ignore[attr-defined]
    return command


@app.command(epilog=TRAIN_EPILOG)
@debuggable
@_with_torchrun
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
            help="The driver, or auto for the best usable one (see `drivetrain backends`) with "
            "which a large model fits on --nproc ranks. By default auto, or that of the run that "
            "is resumed.",
            autocompletion=backends,
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
            help="Resume from a run folder or a checkpoint; auto: from the newest checkpoint in "
            "--out, or start over when there is none. Without a recipe, the resumed run's recipe "
            "and --set values are used.",
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
    preemption_notice: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NOTICE",
            help="Save and stop on this notice, as on a signal: file:/path (the path exists), "
            "command:... (run every 5 seconds; its exit code is 0) or signal:SIGUSR2. Repeatable.",
            show_default=False,
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Send the figures to tensorboard, wandb, mlflow or trackio, too. A resumed run "
            "continues its curve, by default with the trackers of before (none: with no tracker). "
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
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines of text in place of the bar.")
    ] = False,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Try everything in seconds: two steps, an evaluation, a save, and two steps more "
            "in another process that resumes. Nothing is kept.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = False,
    overfit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Short for --set data.overfit=N: train and evaluate on the first N samples.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = None,
    detect_anomaly: Annotated[
        bool,
        typer.Option(
            "--detect-anomaly",
            help="Short for --set detect_anomaly=true: end at the first operation whose backward "
            "gives NaN, and name its line.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = False,
    stats: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Short for --set stats.every=N: every N logs, norms of gradient, weights and "
            "update of each parameter, zeros, and values that are not finite.",
            rich_help_panel=_DEBUGGING,
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Before training, show the ways to place the ranks that --backend auto chooses "
            "from, as `drivetrain plan` does.",
        ),
    ] = False,
    nnodes: Annotated[
        str | None,
        typer.Option(help="Machines, or MIN:MAX.", rich_help_panel=_TORCHRUN),
    ] = None,
    **torchrun: str | None,
) -> None:
    """Train a recipe; without one, a small GPT on the source of Python's standard library."""
    from ...kernel.paths import place
    from ...trainer.profiler import parse_steps
    from ..process.launch import Launch
    from ..settings.config_files import requested
    from ..training.fast import fast as try_all
    from ..training.train import TrainRequest
    from ..training.train import train as run

    given = {name.replace("_", "-"): value for name, value in torchrun.items() if value is not None}
    shorthands = {
        "steps": steps,
        "epochs": epochs,
        "seed": seed,
        "overfit": overfit,
        "detect_anomaly": detect_anomaly,
        "stats": stats,
        "preemption_notice": preemption_notice or None,
    }
    request = TrainRequest(
        requested=requested(recipe, backend, config, set_, shorthands),
        out=None if out is None else place(out),
        resume=resume,
        launch=Launch(nproc, nnodes, given),
        track=track,
        profile=None if profile is None else parse_steps(profile),
        stop_after=stop_after,
        json=json,
        plain=plain,
        plan=plan,
    )
    raise typer.Exit(try_all(sys.argv[1:]) if fast else run(request))


def parse_arguments(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Parse the arguments as `drivetrain train` does, and return their values by the names of its
    parameters. Raises `SettingError`."""
    from ...kernel.errors import SettingError

    for word in arguments:
        if "\0" in word:
            raise SettingError(f"{word!r:.80} holds the character NUL, which no command can have")
    command: Any = typer.main.get_command(app)
    try:
        context = command.make_context("train", list(arguments))
    except Exception as error:  # of click, or of the copy of it that typer carries
        words = shlex.join(arguments)
        raise SettingError(f"drivetrain train refuses {words}: {error}") from error
    parameters: Mapping[str, Any] = context.params
    return parameters
