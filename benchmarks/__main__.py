"""`python -m benchmarks NAME`: drivetrain beside a plain loop and its peers.

    uv run --extra bench python -m benchmarks list
    uv run --extra bench python -m benchmarks step gpt --rounds 5
    uv run --extra bench python -m benchmarks all --document

Peers that are not installed are left out, and what needs a GPU where there is none. `--json FILE`
keeps every round; `--document` puts the records beside docs/performance.md and writes that page.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from . import report
from .suite import BENCHMARKS


def main(
    names: Annotated[list[str], typer.Argument(help="Names, or list, all, page.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="A tenth of the work: a look, no result.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the records.")] = None,
    document: Annotated[bool, typer.Option(help="Write docs/performance.md.")] = False,
) -> None:
    """Measure the named benchmarks, one after the other."""
    if names == ["list"]:
        for name, benchmark in BENCHMARKS.items():
            why_not = benchmark.missing()
            print(f"{name:14} {benchmark.title}{why_not and f' (not here: {why_not})'}")
        return
    if names == ["page"]:
        report.PAGE.write_text(report.page())
        return
    chosen = list(BENCHMARKS) if names == ["all"] else names
    if unknown := set(chosen) - set(BENCHMARKS):
        raise typer.BadParameter(f"{', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    not_here = {} if quick and not document else _not_here(chosen)
    if names != ["all"] and not_here:
        raise typer.BadParameter("; ".join(f"{name}: {why}" for name, why in not_here.items()))
    for name, why in not_here.items():
        _report(f"{name} is left out: {why}")
        chosen.remove(name)
    records: dict[str, Any] = {}
    for name in chosen:
        benchmark = BENCHMARKS[name]
        record = records[name] = benchmark.rounds(rounds, quick, _report)
        print(f"\n## {benchmark.title}\n\n{report.table(benchmark, record)}")
        print(report.where(record))
        if document:
            report.keep(name, record, partial(report.plot, benchmark))
    if json_file is not None:
        json_file.write_text(json.dumps(records, indent=1))


def _not_here(names: list[str]) -> dict[str, str]:
    return {name: why for name in names if (why := BENCHMARKS[name].missing())}


def _report(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
