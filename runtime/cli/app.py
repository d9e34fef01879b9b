"""The commands and their arguments; what they do is in the modules that they import when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    name="drivetrain",
    help="Write the training once; choose the hardware with an argument; resume anywhere.",
    epilog="[bold]Start here:[/]  drivetrain train    (two minutes on a laptop, no download)",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

TRAIN_EPILOG = """[bold]Examples[/]

drivetrain train

drivetrain train my.py --set optimizer.lr=3e-4 --set recipe.width=256 --steps 1000

drivetrain train my.py --backend ddp --nproc 8 --out runs/first

drivetrain train --resume runs/first --steps 2000

drivetrain train my.py --out runs/first --resume auto   (the line for a job that is restarted)

drivetrain train my.py --nproc 8 --nnodes 2 --node-rank 0 --master-addr host1 --out runs/big

Under torchrun, or srun with one task a device, leave --nproc out: ranks notice their launcher.

[bold]Exit codes[/]: 0 done; 1 failed; 2 the request cannot be carried out; 75 asked to stop by a
signal, saved, resume it.

[bold]From Python[/]: drivetrain.fit
"""


@app.command(epilog=TRAIN_EPILOG)
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
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting (optimizer.lr=3e-4), the recipe's configuration "
            "(recipe.width=256) or an option of the driver (backend.threads=2). Repeatable.",
        ),
    ] = None,
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
    json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON an event, and nothing else.")
    ] = False,
    debug: Debug = False,
    nnodes: Annotated[
        str | None,
        typer.Option(help="Machines, or MIN:MAX.", rich_help_panel="Handed to torchrun"),
    ] = None,
    node_rank: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    master_addr: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    master_port: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    rdzv_id: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    rdzv_conf: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    local_addr: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    max_restarts: Annotated[str | None, typer.Option(rich_help_panel="Handed to torchrun")] = None,
    monitor_interval: Annotated[
        str | None, typer.Option(rich_help_panel="Handed to torchrun")
    ] = None,
) -> None:
    """Train a recipe; without one, a small GPT on the source of Python's standard library."""
    from .failure import told

    with told(debug=debug):
        from ..kernel.paths import place
        from .launch import Launch
        from .resolve_settings import parse_pairs
        from .train import TrainRequest
        from .train import train as run

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
            given=parse_pairs(set_ or (), {"steps": steps, "epochs": epochs, "seed": seed}),
            out=None if out is None else place(out),
            resume=resume,
            launch=Launch(nproc, nnodes, given),
            stop_after=stop_after,
            json=json,
        )
        raise typer.Exit(run(request))


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CheckpointPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH|URL",
        help="A checkpoint, or a run (its newest complete checkpoint): a folder, or a URL such as "
        "s3://bucket/run.",
    ),
]


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain backends\n\ndrivetrain backends --json\n\n"
    "[bold]From Python[/]: drivetrain.kernel.registry.known_backends and find_driver"
)
def backends(json: AsJson = False, debug: Debug = False) -> None:
    """All known drivers: usable here or not, why not, and how to install what is missing."""
    from .failure import told

    with told(debug=debug):
        from .backends import backend_records, show_backends
        from .tables import open_console

        records = backend_records()
        if json:
            _print_json(records)
        else:
            show_backends(records, open_console())


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain explain my.py --backend fsdp --nproc 8\n\n"
    "drivetrain explain my.py --all --nproc 2 --set optimizer.name=torch.optim.SGD\n\n"
    "[bold]From Python[/]: drivetrain.cli.explain.explain"
)
def explain(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe file; by default the small GPT.", show_default=False),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", "-b", help="The driver, or auto.")] = "auto",
    every: Annotated[bool, typer.Option("--all", help="All drivers, side by side.")] = False,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to plan for; none is started.")] = 1,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As in train.")
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """What a run would do: each value and its source, what is wrapped, tied, cast and sharded, and
    the memory that it would take."""
    from .failure import told

    with told(debug=debug):
        from .explain import explain, show_explanation
        from .resolve_settings import parse_pairs
        from .tables import open_console

        names = None if every else [backend]
        records = explain(recipe, names, parse_pairs(set_ or (), {}), nproc)
        if json:
            _print_json(records)
        else:
            show_explanation(records, open_console())


checkpoint = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Look into checkpoints, check them, and trade weights with other libraries.",
)
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command(
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint inspect runs/first\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.CheckpointReader"
)
def inspect(path: CheckpointPath, json: AsJson = False, debug: Debug = False) -> None:
    """Who wrote it, when, and which tensors it holds; reads no tensor."""
    from .failure import told

    with told(debug=debug):
        from ..kernel.paths import place
        from .checkpoints import inspect, locate, show
        from .tables import open_console

        record = inspect(locate(place(path)))
        if json:
            _print_json(record)
        else:
            show(record, open_console())


@checkpoint.command(
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint verify runs/first\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.CheckpointReader.verify"
)
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL", help="A checkpoint, or a run (all its checkpoints): folder or URL."
        ),
    ],
    debug: Debug = False,
) -> None:
    """Read every byte and compare checksums; exit 1 and name what is not as it was written."""
    from .failure import say, told

    with told(debug=debug):
        from ..kernel.errors import printable
        from ..kernel.paths import place
        from .checkpoints import verify

        checkpoints, problems = verify(place(path))
        for problem in problems:
            say(problem, label="damaged:", style="bold red")
        if problems:
            raise typer.Exit(1)
        for found in checkpoints:
            typer.echo(printable(f"{found}: complete and unaltered"))


@checkpoint.command(
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint export runs/first exported/first\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.export_weights"
)
def export(
    path: CheckpointPath,
    folder: Annotated[Path, typer.Argument(help="A new folder, for model.safetensors.")],
    debug: Debug = False,
) -> None:
    """Write the weights as whole tensors, in the layout that `from_pretrained` reads."""
    from .failure import told

    with told(debug=debug):
        from ..checkpoint import export_weights
        from ..kernel.errors import printable
        from ..kernel.paths import place
        from .checkpoints import locate

        written = export_weights(locate(place(path)), folder)
        typer.echo(printable(f"weights written to {written}"))


@checkpoint.command(
    "import",
    epilog="[bold]Example[/]\n\ndrivetrain checkpoint import exported/first runs/second\n\n"
    "drivetrain train my.py --resume runs/second/checkpoints --out runs/second-trained\n\n"
    "[bold]From Python[/]: drivetrain.checkpoint.import_weights",
)
def import_(
    folder: Annotated[Path, typer.Argument(help="A folder with safetensors weights.")],
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run folder, or URL, to put a checkpoint of step 0 in."
        ),
    ],
    debug: Debug = False,
) -> None:
    """Make a checkpoint that any driver starts from out of safetensors weights."""
    from .failure import told

    with told(debug=debug):
        from ..checkpoint import CHECKPOINTS, import_weights
        from ..kernel.errors import printable
        from ..kernel.paths import place

        target = import_weights(folder, place(run) / CHECKPOINTS)
        typer.echo(printable(f"checkpoint written to {target}"))


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain conform --backend cpu\n\n"
    "drivetrain conform --backend ddp --nproc 2 -k gradient --report conformance\n\n"
    "drivetrain conform --backend mine --backend-set threads=2 --peer cpu --peer ddp:2\n\n"
    "drivetrain conform --backend mine -- -x --tb=short   (behind --, what pytest takes)\n\n"
    "[bold]Exit codes[/]: 0 all laws are kept; 1 some are not; 5 nothing ran; 69 the driver cannot "
    "run here.\n\n[bold]From Python[/]: drivetrain.conformance.cases"
)
def conform(
    backend: Annotated[str, typer.Option(help="The driver to prove.")],
    nproc: Annotated[int | None, typer.Option(help="Ranks; by default the suite chooses.")] = None,
    backend_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the driver. Repeatable."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:N]",
            help="A driver to exchange checkpoints with, in N processes; by default the driver "
            "itself in other numbers of processes. Repeatable.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="A folder for the report, in JSON and HTML.")
    ] = None,
    select: Annotated[
        str | None, typer.Option("-k", metavar="EXPR", help="Only cases that match, as in pytest.")
    ] = None,
    allow_unavailable: Annotated[
        bool, typer.Option("--allow-unavailable", help="A driver that cannot run here is no error.")
    ] = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- PYTEST...]", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Prove that a driver keeps the laws of the contract; needs pytest. How long it takes is said
    at its start."""
    from .failure import told

    with told(debug=debug):
        from .conform import conform

        options = {
            "--nproc": nproc,
            "--backend-set": backend_set,
            "--peer": peer,
            "--report": report,
        }
        more = [] if select is None else ["-k", select]
        flags = {"--allow-unavailable": allow_unavailable}
        raise typer.Exit(conform(backend, options, flags, [*more, *(arguments or ())]))


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=1))
