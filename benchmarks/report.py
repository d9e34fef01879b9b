"""Records as Markdown, as plots, and as docs/performance.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import ROOT, Benchmark, spread

PAGE = ROOT / "docs" / "performance.md"
RECORDS = ROOT / "docs" / "performance"
HEAD = """# Performance

Written by `uv run --extra bench python -m benchmarks NAME --document`, a section a benchmark, from
the records in [performance/](performance), which hold every round. Each candidate runs in a process
of its own, and all take turns in every round; a cell is the median over rounds, and a ratio is
taken inside a round: [least-greatest]. In rounds of blocks the processes live side by side and take
turns by blocks; the median is over all blocks, a ratio is taken inside one turn of all, and its
spread is that of the middle half: [first-third quartile]; where a column says "its median at 95 %",
the interval is where the median lies. The load beside a machine's name is that
of others when the measurement began (the average over a minute; 0 is a quiet machine): where it is
not near 0, read ratios and not absolutes.
"""
NO_GPU = """## On a GPU

No figure on this page was taken on a GPU, and none is claimed: `gpu` is written for one card, and
has run nowhere but in small, on a CPU, to try its code.

Tested without a card is what can be: which card a process takes and when it meets the others, that
batches are copied from pinned memory on a stream of their own, one ahead, and who waits for whom
(`tests/backends/test_cuda_calls.py`); that a step waits for no answer of the device
(`tests/kernel/test_no_sync.py`); and that products in float8 have the shapes that the kernels take
(`tests/backends/test_float8.py`). Not exercised is what these calls do there: NCCL, the overlap of
copies and communication with computing, memory that is pinned, and the kernels of float8.
"""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(benchmark: Benchmark, record: Mapping[str, Any]) -> str:
    """The candidates' figures, and what follows from them."""
    head = ["", *(column.title for column in benchmark.columns)]
    conclusion = benchmark.conclusion(record)
    return markdown(head, benchmark.rows(record)) + (f"\n{conclusion}\n" if conclusion else "")


def where(record: Mapping[str, Any]) -> str:
    """Return a line under a table: the command, and the machine that it ran on."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    size = " --quick" if record.get("quick") else ""
    counts = [(record[name], name) for name in ("rounds", "blocks") if name in record]
    rounds = "".join(f"{n} {name.removesuffix('s') if n == 1 else name} of " for n, name in counts)
    device = f"{machine['device']}, " if "device" in machine else ""
    return (
        f"{rounds}`python -m benchmarks {record['benchmark']}{size}`: {device}"
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"load {machine['load_before']:.1f}; {versions}.\n"
    )


def plot(benchmark: Benchmark, record: Mapping[str, Any], path: Path) -> None:
    """Plot one column of the table, a bar for each candidate, with least and greatest."""
    from matplotlib.figure import Figure

    (column,) = (each for each in benchmark.columns if each.title == benchmark.plotted)
    measured = record["measured"]
    base = measured[next(iter(benchmark.candidates))]
    values = {
        label: found
        for name, label in benchmark.candidates.items()
        if (found := column.values(measured.get(name, []), base[: len(measured.get(name, []))]))
    }
    middle = [statistics.median(each) for each in values.values()]
    error = [
        [m - spread(each)[0] for m, each in zip(middle, values.values(), strict=True)],
        [spread(each)[1] - m for m, each in zip(middle, values.values(), strict=True)],
    ]
    figure = Figure(figsize=(7, 0.4 * len(values) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(values), middle, xerr=error, height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel(column.title)
    if column.ratio:
        axes.axvline(1.0, color="black", linewidth=0.8)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """An SVG that is the same for the same figures."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "drivetrain"}):
        figure.savefig(path, metadata={"Date": None})


def keep(name: str, record: Mapping[str, Any], plot: Callable[[Any, Path], None]) -> None:
    """Store a record and its plot in the folder of records, and write the page again."""
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(record, RECORDS / f"{name}.svg")
    PAGE.write_text(page())


def page() -> str:
    """The text of docs/performance.md, of all records that there are."""
    from . import growth, scale
    from .suite import BENCHMARKS

    sections, waiting = [HEAD], []
    for name, benchmark in BENCHMARKS.items():
        path = RECORDS / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            shown = f"![{benchmark.plotted}](performance/{name}.svg)"
            sections.append(
                f"## {benchmark.title}\n\n{benchmark.about}\n\n{table(benchmark, record)}\n"
                f"{where(record)}\n{shown}\n"
            )
        else:
            waiting.append(f"- `{name}`: {benchmark.title}\n")
    for name, of in (("growth", growth), ("scale", scale)):
        if (path := RECORDS / f"{name}.json").exists():
            sections.append(of.section(json.loads(path.read_text())))
    if waiting:
        sections.append(f"## Not measured yet\n\n{''.join(waiting)}")
    if not (RECORDS / "gpu.json").exists():
        sections.append(NO_GPU)
    return "\n".join(sections)
