"""`drivetrain conform`: the suite that proves a driver, which comes with the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from .options import debuggable

__all__ = ["app"]

app = typer.Typer()

SUITE = "drivetrain.conformance"


@app.command(
    epilog="[bold]Examples[/]\n\ndrivetrain conform --backend cpu\n\n"
    "drivetrain conform --backend ddp --nproc 2 -k gradient --report conformance\n\n"
    "drivetrain conform --backend mine --backend-set threads=2 --peer cpu --peer ddp:2\n\n"
    "drivetrain conform --backend mine -- -x --tb=short   (after --, arguments of pytest)\n\n"
    "[bold]Exit codes[/]: 0 all laws are kept; 1 some are not; 5 nothing ran; 69 the driver cannot "
    "run here.\n\n[bold]From Python[/]: drivetrain.conformance.cases"
)
@debuggable
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
) -> None:
    """Prove that a driver keeps the laws of the contract; needs pytest. At its start it says how
    long it takes."""
    options = {
        "--nproc": nproc,
        "--backend-set": backend_set,
        "--peer": peer,
        "--report": report,
    }
    more = [] if select is None else ["-k", select]
    flags = {"--allow-unavailable": allow_unavailable}
    raise typer.Exit(_run_suite(backend, options, flags, [*more, *(arguments or ())]))


def _run_suite(
    backend: str,
    options: Mapping[str, object],
    flags: Mapping[str, bool],
    arguments: Sequence[str],
) -> int:
    """Run the suite on a driver in its own process; return pytest's exit code. `options`: by name,
    with a list of values for one that was given several times. `arguments`: pytest's own."""
    import importlib.util
    import subprocess
    import sys

    from ...kernel.errors import UsageError
    from ...registry import find_driver

    if importlib.util.find_spec("pytest") is None:
        raise UsageError(
            "the conformance suite needs pytest, which is not installed; install it with: "
            f"{sys.executable} -m pip install pytest"
        )
    find_driver(backend)  # raises UnknownBackend with the nearest name
    command = [sys.executable, "-m", SUITE, f"--backend={backend}"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        command += [f"{name}={each}" for each in values if each is not None]
    command += [name for name, given in flags.items() if given]
    return subprocess.run([*command, *arguments], check=False).returncode
