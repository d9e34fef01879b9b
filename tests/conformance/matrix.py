"""Who resumes whom: every driver and world size, from every other's checkpoint.

As tests (`crossing`), and as a page::

    python -m drivetrain.conformance.matrix --report DIR NAME[:PROCESSES][,OPTION=VALUE ...] ...
"""

from __future__ import annotations

import argparse
import html
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from ..kernel.checkpoint import CheckpointReader
from ..kernel.settings import OptimizerSettings
from .bench import Bench
from .judge import LawBroken, require, require_close, require_same, require_same_bits
from .problems import PROBLEMS
from .runs import run
from .state import State, assemble, pieces, read_all
from .subject import Subject

__all__ = ["OPTIMIZERS", "Crossing", "Saved", "crossing", "parse_subject", "save", "title"]

PROBLEM = "language"
"""Tied weights, and items that are not samples."""

SAVED_AT = 4
STEPS = SAVED_AT + 10
SAMPLES = 22

OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"optimizer.name": "torch.optim.AdamW"},
    "SGD with momentum": {"optimizer.name": "torch.optim.SGD", "optimizer.args.momentum": 0.9},
    "Adafactor": {"optimizer.name": "torch.optim.Adafactor"},
}

NEXT_LOSS = 1e-6
"""Relative: the same weights on the same samples, summed in another order."""

TEN_LOSSES = 1e-5
"""Relative: rounding of ten updates besides, which AdamW and Adafactor amplify where a gradient is
nearly zero."""


@dataclass(frozen=True)
class Saved:
    """A run that saved, and went on."""

    writer: str
    optimizer: str
    checkpoint: str
    told: dict[str, Any]
    state: State


@dataclass(frozen=True)
class Crossing:
    """What came of a resume; `error` is empty when all held."""

    writer: str
    reader: str
    optimizer: str
    next_loss: float
    """Relative deviation of the first loss after resuming."""
    ten_losses: float
    """The largest of the first ten."""
    error: str = ""


def title(subject: Subject) -> str:
    """With what tells it from others of the same driver."""
    options = "".join(f" {key}={value}" for key, value in subject.options.items())
    return f"{subject.backend} x{subject.world}{options}"


def save(writer: Subject, folder: str, optimizer: str) -> Saved:
    """Train on `writer`, saving on the way. Raises `WorkerFailure`."""
    told = _run(writer, f"{folder}/straight", optimizer)
    source = told["checkpoint"].replace(f"{STEPS:06}", f"{SAVED_AT:06}")
    return Saved(title(writer), optimizer, source, told, read_all(CheckpointReader(source)))


def crossing(saved: Saved, reader: Subject, folder: str) -> Crossing:
    """Resume on `reader`. Raises `LawBroken` unless weights and moments are bit-equal, samples and
    learning rates the same, tied weights tied, and losses near."""
    source, optimizer = saved.checkpoint, saved.optimizer
    ranks = reader.run(restored, source=source, optimizer=optimizer)
    state = assemble([rank["state"] for rank in ranks])
    for kind in ("weights", "optimizer"):
        what = f"{kind} written by {saved.writer}, restored by {title(reader)}"
        require_same_bits(what, state[kind], saved.state[kind])
    require(all(rank["tied"] for rank in ranks), "tied weights are not one after restoring")
    told = _run(reader, f"{folder}/on", optimizer, resume=source)
    what = f"written by {saved.writer}, resumed by {title(reader)}"
    require_same(f"samples of each step, {what}", told["ids"], saved.told["ids"][SAVED_AT:])
    rates = [[line["learning_rate"] for line in run_["logged"]] for run_ in (told, saved.told)]
    require_same(f"learning rates, {what}", rates[0], rates[1][SAVED_AT:])
    actual, expected = ([line["loss"] for line in t["logged"]] for t in (told, saved.told))
    expected = expected[SAVED_AT:]
    require_close(f"next loss, {what}", actual[:1], expected[:1], NEXT_LOSS)
    require_close(f"losses, {what}", actual, expected, TEN_LOSSES)
    off = [abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True)]
    return Crossing(saved.writer, title(reader), optimizer, off[0], max(off))


def _run(subject: Subject, out: str, optimizer: str, **arguments: Any) -> dict[str, Any]:
    settings = {
        "steps": STEPS,
        "global_batch": 8,
        "micro_batch": 4,
        "log_every": 1,
        "optimizer.lr": 0.01,
        "checkpoint.every": 1,
        "checkpoint.keep_last": STEPS,
        **OPTIMIZERS[optimizer],
    }
    ranks = subject.run(
        run, problem=PROBLEM, samples=SAMPLES, settings=settings, out=out, **arguments
    )
    steps = zip(*(rank["ids"] for rank in ranks), strict=True)
    ids = [sorted({index for part in step for index in part}) for step in steps]
    return {**ranks[0], "ids": ids}


def restored(bench: Bench, *, source: str, optimizer: str) -> dict[str, Any]:
    """A job: what each rank would write right after restoring, and whether ties hold."""
    settings = OPTIMIZERS[optimizer]
    factory = OptimizerSettings(
        name=settings["optimizer.name"],
        args={
            key.removeprefix("optimizer.args."): value
            for key, value in settings.items()
            if key.startswith("optimizer.args.")
        },
    )
    with bench.open() as session:
        engine = session.prepare(PROBLEMS[PROBLEM].recipe(optimizer=factory.build))
        engine.restore(CheckpointReader(source))
        return {"state": pieces(engine), "tied": len(engine.tied) == 1}


def parse_subject(text: str, python: str | None = None) -> Subject:
    """`NAME[:PROCESSES][,OPTION=VALUE ...]`."""
    head, *options = text.split(",")
    name, _, processes = head.partition(":")
    chosen = dict(option.split("=", 1) for option in options)
    return Subject(name, int(processes) if processes else 1, chosen, python=python)


def write_page(folder: Path, crossings: Sequence[Crossing]) -> None:
    """`matrix.json` and `matrix.html`: a heat map for each optimizer."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [asdict(each) for each in crossings]
    (folder / "matrix.json").write_text(json.dumps(records, indent=1))
    tables = "".join(
        _table(name, [c for c in crossings if c.optimizer == name]) for name in OPTIMIZERS
    )
    template = Template((Path(__file__).parent / "matrix.html").read_text(encoding="utf-8"))
    (folder / "matrix.html").write_text(template.substitute(tables=tables), encoding="utf-8")


def _table(optimizer: str, crossings: Sequence[Crossing]) -> str:
    if not crossings:
        return ""
    readers = list(dict.fromkeys(each.reader for each in crossings))
    writers = list(dict.fromkeys(each.writer for each in crossings))
    by_pair = {(each.writer, each.reader): each for each in crossings}
    head = "".join(f"<th>{html.escape(reader)}</th>" for reader in readers)
    rows = "".join(
        f"<tr><th>{html.escape(writer)}</th>"
        + "".join(_cell(by_pair.get((writer, reader))) for reader in readers)
        + "</tr>"
        for writer in writers
    )
    return (
        f"<h2>{html.escape(optimizer)}</h2><div class=scroll><table><tr><th>saved by \\ resumed by"
        f"</th>{head}</tr>{rows}</table></div>"
    )


def _cell(each: Crossing | None) -> str:
    if each is None:
        return "<td class=none></td>"
    if each.error:
        return f'<td class=broken title="{html.escape(each.error)}">broken</td>'
    # on a logarithmic scale of four decades below the bound, which is full colour
    heat = 1 + math.log10(each.ten_losses / TEN_LOSSES) / 4 if each.ten_losses else 0.0
    return f'<td style="--heat:{max(0.0, heat):.2f}">{each.ten_losses:.0e}</td>'


def main() -> int:
    """The page over all pairs of the drivers on the command line."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.conformance.matrix")
    parser.add_argument("subjects", nargs="+", metavar="NAME[:PROCESSES][,OPTION=VALUE]")
    parser.add_argument("--report", type=Path, required=True, help="folder of the page")
    chosen = parser.parse_args()
    subjects = [parse_subject(text) for text in chosen.subjects]
    crossings = []
    for optimizer in OPTIMIZERS:
        for writer in subjects:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    saved = save(writer, folder, optimizer)
                except Exception as error:
                    print(f"{optimizer}: {title(writer)} cannot save: {error}")
                    continue
                for number, reader in enumerate(subjects):
                    try:
                        found = crossing(saved, reader, f"{folder}/{number}")
                    except LawBroken as broken:
                        nan = float("nan")
                        found = Crossing(
                            title(writer), title(reader), optimizer, nan, nan, str(broken)
                        )
                    crossings.append(found)
                    outcome = found.error or found.ten_losses
                    print(f"{optimizer}: {found.writer} -> {found.reader}: {outcome}")
    write_page(chosen.report, crossings)
    return int(any(each.error for each in crossings))


if __name__ == "__main__":
    raise SystemExit(main())
