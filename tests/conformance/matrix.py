"""Matrix of who resumes whom: every driver and world size, from every other's checkpoint.

python -m drivetrain.conformance.matrix --report DIR NAME[:PROCESSES][,OPTION=VALUE ...] ...
"""

from __future__ import annotations

import argparse
import csv
import html
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from string import Template
from typing import Any

from .crossing import TRAININGS, Crossing, Saved, crossing, refusal, save, title
from .harness import WorkerFailure
from .judge import LawBroken
from .subject import Subject

__all__ = ["crossings", "main", "make_page", "parse_subject", "write_page"]


def parse_subject(text: str, python: str | None = None) -> Subject:
    """Parse `NAME[:PROCESSES][,OPTION=VALUE ...]`."""
    head, *options = text.split(",")
    name, _, processes = head.partition(":")
    chosen = dict(option.split("=", 1) for option in options)
    return Subject(name, int(processes) if processes else 1, chosen, python=python)


def crossings(
    subjects: Sequence[Subject], folder: str, trainings: Sequence[str] | None = None
) -> Iterator[Crossing]:
    """Try all pairs in these trainings, by default in all; checkpoints are kept in `folder` until
    the last is done.
    """
    trainings = [*TRAININGS] if trainings is None else trainings
    saved: dict[tuple[Subject, str], Saved] = {}
    refused: dict[tuple[Subject, str], str] = {}
    for number, writer in enumerate(subjects):
        for training in trainings:
            refused[writer, training] = refusal(writer, training)
            if not refused[writer, training]:
                saved[writer, training] = save(writer, f"{folder}/{number} {training}", training)
    for reader in reversed(subjects):  # the last to save are still up
        for (writer, training), declined in refused.items():
            found = Crossing(title(writer), title(reader), training)
            if words := declined or refused[reader, training]:
                yield replace(found, refused=words)
                continue
            try:
                yield crossing(saved[writer, training], reader)
            except (LawBroken, WorkerFailure) as broken:
                yield replace(found, error=str(broken))


def write_page(folder: Path, found: Sequence[Crossing], name: str = "matrix") -> None:
    """Write `NAME.csv`, and `NAME.html` with a heat map for each training."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Crossing)])
        table.writeheader()
        table.writerows(asdict(each) for each in found)
    tables = "".join(_table(each, [c for c in found if c.training == each]) for each in TRAININGS)
    template = Template((Path(__file__).parent / "matrix.html").read_text(encoding="utf-8"))
    (folder / f"{name}.html").write_text(template.substitute(tables=tables), encoding="utf-8")


def read_table(path: Path) -> list[Crossing]:
    """Return what `write_page` wrote in a `NAME.csv`."""
    numbers = [column.name for column in fields(Crossing) if column.type == "float"]
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [Crossing(**{**row, **{key: float(row[key]) for key in numbers}}) for row in rows]


def _table(training: str, found: Sequence[Crossing]) -> str:
    if not found:
        return ""
    names = dict.fromkeys(each.writer for each in found)
    by_pair = {(each.writer, each.reader): each for each in found}
    head = "".join(f"<th><span>{html.escape(name)}</span></th>" for name in names)
    bound = TRAININGS[training].bound
    rows = "".join(
        f"<tr><th>{html.escape(writer)}</th>"
        + "".join(_cell(by_pair[writer, reader], bound) for reader in names)
        + "</tr>"
        for writer in names
    )
    return (
        f"<h2>{html.escape(training)}</h2><p>Allowed: {bound:.1g}</p>"
        f"<table><tr class=readers><th>saved by \\ resumed by</th>{head}</tr>{rows}</table>"
    )


def _cell(each: Crossing, bound: float) -> str:
    reader = f'data-reader="{html.escape(each.reader)}"'
    if each.error:
        return f'<td class=broken {reader} title="{html.escape(each.error)}">broken</td>'
    if each.refused:
        return f'<td class=refused {reader} title="{html.escape(each.refused)}">refused</td>'
    # on a logarithmic scale of four decades below the bound, which is full colour
    heat = 1 + math.log10(each.ten_losses / bound) / 4 if each.ten_losses else 0.0
    return f'<td {reader} style="--heat:{max(0.0, heat):.2f}">{each.ten_losses:.0e}</td>'


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page over all pairs of the drivers on the command line; return 1 if a pair is
    broken.
    """
    parser = argparse.ArgumentParser(prog="python -m drivetrain.conformance.matrix")
    parser.add_argument("subjects", nargs="+", metavar="NAME[:PROCESSES][,OPTION=VALUE]")
    parser.add_argument("--report", type=Path, required=True, help="folder of the page")
    parser.add_argument("--python", help="the interpreter of another environment, for all drivers")
    chosen = parser.parse_args(arguments)
    subjects = [parse_subject(text, chosen.python) for text in chosen.subjects]
    return make_page(chosen.report, subjects)


def make_page(
    folder: Path,
    subjects: Sequence[Subject],
    name: str = "matrix",
    trainings: Sequence[str] | None = None,
) -> int:
    """Try all pairs and write their page; return 1 if a pair is broken."""
    found = []
    with tempfile.TemporaryDirectory() as checkpoints:
        for each in crossings(subjects, checkpoints, trainings):
            found.append(each)
            outcome = each.error or each.refused or f"{each.ten_losses:.1e}"
            print(f"{each.training}: {each.writer} -> {each.reader}: {outcome}", flush=True)
    write_page(folder, found, name)
    return int(any(each.error for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
