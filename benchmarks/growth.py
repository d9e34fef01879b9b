"""Cost of a rank's own work as ranks and data grow, measured on one machine.

    python -m benchmarks.growth [--document] [--ranks 2,4,8] [--samples 1000,1000000]

Ranks: processes of the driver `ddp` over gloo add up a step's counts, in shared memory and over TCP
(as ranks on several machines do), and exchange a value. Data: one of 64 readers plans and fetches
microbatches of ever larger data sets. Readers: one of ever more readers takes its part of a global
batch that grows with their number.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from drivetrain import Mix, Recipe
from drivetrain.backends.ddp import DdpOptions
from drivetrain.backends.ddp import driver as ddp
from drivetrain.backends.process_group import session as sessions
from drivetrain.conformance.ports import free_port
from drivetrain.data.open_dataset import by_sample
from drivetrain.kernel.batches import Position
from drivetrain.kernel.plan import Plan

from . import report
from .harness import machine, timed

MICRO_BATCH = 8
STEP = (1.0, 8.0, 0.0, 0.0, 0.0, 0.0)
"""Values added up in a step: its number, its items, and a number for each kind of request."""


# --- ranks ----------------------------------------------------------------------------------------


def _rank(rank: int, size: int, port: int, times: int) -> dict[str, Any]:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    recipe = Recipe(
        model=lambda: nn.Linear(16, 1),
        loss=lambda module, batch: module(batch).sum(),
        optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], lr=0.1),
    )
    plan = Plan(global_batch=size, timeout_seconds=300.0, options=DdpOptions(device="cpu"))
    found: dict[str, Any] = {}
    before = own_bytes()
    with ddp.open(plan) as session:
        engine = session.prepare(recipe)
        begin: dict[str, Callable[[], Callable[[], Any]]] = {
            "shared": partial(session.tally, STEP),
            "tcp": partial(sessions._add_up, STEP),
            "exchange": lambda: partial(session.exchange, {"rank": rank, "free": 1 << 40}),
        }
        for name, begun in begin.items():
            for _ in range(3):
                begun()()
            with timed() as clock:
                for _ in range(times):
                    begun()()
            found[name] = {"cpu": clock.cpu / times, "wall": clock.wall / times}
        found["memory"] = own_bytes() - before
        assert session._shared_memory is not None, "these ranks share no memory"
        del engine
    return found


def own_bytes() -> int:
    """Memory that this process shares with no other (Linux)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/smaps_rollup has no Private_Dirty")


def of_ranks(size: int, times: int) -> dict[str, Any]:
    """Figures of so many ranks: the median over ranks, and the fullest memory."""
    port = free_port()
    with _processes(size) as processes:
        ranks = [processes.submit(_rank, rank, size, port, times) for rank in range(size)]
        found = [rank.result() for rank in ranks]
    return {
        "ranks": size,
        "memory": max(each["memory"] for each in found),
        **{
            name: {
                clock: statistics.median(each[name][clock] for each in found)
                for clock in ("cpu", "wall")
            }
            for name in ("shared", "tcp", "exchange")
        },
    }


def _processes(number: int) -> ProcessPoolExecutor:
    """Processes that have imported what this one has; they may have workers of their own."""
    context = multiprocessing.get_context("forkserver")
    # what takes seconds; torch's optimizers import its compiler
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    return ProcessPoolExecutor(number, context, torch.set_num_threads, (1,))


# --- data -----------------------------------------------------------------------------------------


class Numbers:
    """A data set of `length` samples, each made when it is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index])


class Stream:
    """Numbers without end, that counts how many were read; its state is the next one."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in count(self.read):
            self.read = number + 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"next": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["next"]


KINDS: dict[str, Callable[[], Any]] = {
    "samples, shuffled": lambda: Numbers(10**9),
    "Mix of three": lambda: Mix({str(n): (Numbers(10**8 * n), n) for n in (1, 2, 3)}),
    "stream": Stream,
    "Mix of three streams": lambda: Mix({str(n): (Stream(), n) for n in (1, 2, 3)}),
}


def read(data: Any, readers: int, workers: int, steps: int, offset: int) -> dict[str, float]:
    """The last reader's seconds to its first microbatch, and CPU seconds for each of the others."""
    started, before = time.perf_counter(), own_bytes()
    source = by_sample(
        data,
        global_batch=MICRO_BATCH * readers,
        micro_batch=MICRO_BATCH,
        reader_index=readers - 1,
        num_readers=readers,
        workers=workers,
        start_method="fork" if workers else None,
    )
    groups = source.groups(Position(0, offset), steps)
    batches = (microbatch.batch for group in groups for microbatch in group.microbatches)
    next(batches)
    first = time.perf_counter() - started
    taken = 0
    with timed() as clock:
        for _ in islice(batches, steps):
            taken += 1
    memory = own_bytes() - before
    return {"first": first, "cpu": clock.cpu / taken, "memory": float(memory)}


def of_samples(length: int, workers: int, steps: int) -> dict[str, Any]:
    """Measure one reader of 64, from the middle of an epoch on."""
    readers = min(64, max(1, length // (2 * MICRO_BATCH)))
    batch = MICRO_BATCH * readers
    data = Numbers(length)
    found = _apart(read, data, readers, workers, steps, length // 2 // batch * batch)
    return {"samples": length, "workers": workers, **found}


def of_readers(kind: str, readers: int, steps: int) -> dict[str, Any]:
    """Measure one of `readers` readers, from the first sample on."""
    return {"kind": kind, "readers": readers, **_apart(_read_kind, kind, readers, steps)}


def _read_kind(kind: str, readers: int, steps: int) -> dict[str, float]:
    return read(KINDS[kind](), readers, 0, steps, 0)


def _apart(act: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """The median of three processes."""
    found = []
    for _ in range(3):
        with _processes(1) as process:
            found.append(process.submit(act, *arguments).result())
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


# --- the command ----------------------------------------------------------------------------------

OF_RANKS = (
    "ranks",
    "shared memory: CPU µs",
    "wall µs",
    "TCP: CPU µs",
    "wall µs",
    "exchange: CPU µs",
    "wall µs",
    "fullest rank's own MB",
)
OF_SAMPLES = ("samples", "workers", "to the first batch, ms", "CPU µs a microbatch", "own MB")
OF_READERS = ("data", "readers", "CPU µs a step of one reader", "for each sample of a step")


def tables(record: dict[str, Any]) -> list[str]:
    """Return the tables of ranks, of samples and of readers, in Markdown."""
    ranks = [
        [
            str(each["ranks"]),
            *(
                f"{each[name][clock] * 1e6:,.0f}"
                for name in ("shared", "tcp", "exchange")
                for clock in ("cpu", "wall")
            ),
            f"{each['memory'] / 1e6:.1f}",
        ]
        for each in record["ranks"]
    ]
    samples = [
        [
            f"{each['samples']:,}",
            str(each["workers"]),
            f"{each['first'] * 1e3:.1f}",
            f"{each['cpu'] * 1e6:.0f}",
            f"{each['memory'] / 1e6:.1f}",
        ]
        for each in record["samples"]
    ]
    readers = [
        [
            each["kind"],
            str(each["readers"]),
            f"{each['cpu'] * 1e6:,.0f}",
            f"{each['cpu'] * 1e6 / (each['readers'] * MICRO_BATCH):.2f}",
        ]
        for each in record["readers"]
    ]
    heads = OF_RANKS, OF_SAMPLES, OF_READERS
    return [
        report.markdown(head, rows)
        for head, rows in zip(heads, (ranks, samples, readers), strict=True)
    ]


def main(
    ranks: str = "2,4,8,16,32,64",
    samples: str = "1000,1000000,1000000000",
    readers: str = "1,4,16,64",
    times: Annotated[int, typer.Option(help="Tallies of a rank; steps of a reader.")] = 200,
    document: Annotated[bool, typer.Option(help="Write docs/performance.md.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure it, and print it."""
    torch.set_num_threads(1)

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",") if each]

    record: dict[str, Any] = {
        "benchmark": "growth",
        "machine": machine() | {"load_before": os.getloadavg()[0]},
        "ranks": [],
        "samples": [],
        "readers": [],
    }
    for size in numbers(ranks):
        print(f"{size} ranks", file=sys.stderr)
        record["ranks"].append(of_ranks(size, times))
    for length in numbers(samples):
        for workers in (0, 2):
            print(f"{length} samples, {workers} workers", file=sys.stderr)
            steps = min(times, max(1, length // (4 * MICRO_BATCH)))
            record["samples"].append(of_samples(length, workers, steps))
    for kind in KINDS:
        for size in numbers(readers):
            print(f"{kind}, {size} readers", file=sys.stderr)
            record["readers"].append(of_readers(kind, size, times))
    print("\n".join(tables(record)))
    if document:
        report.keep("growth", record, plot)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1))


def plot(record: dict[str, Any], path: Path) -> None:
    """Three curves of growth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    tally, memory, reader = figure.subplots(1, 3)
    sizes = [each["ranks"] for each in record["ranks"]]
    for name, label in (("shared", "shared memory"), ("tcp", "TCP"), ("exchange", "exchange")):
        tally.plot(
            sizes, [each[name]["cpu"] * 1e6 for each in record["ranks"]], marker="o", label=label
        )
    tally.set_title("a tally, CPU µs of a rank")
    memory.plot(sizes, [each["memory"] / 1e6 for each in record["ranks"]], marker="o")
    memory.set_title("a rank's own MB")
    for kind in dict.fromkeys(each["kind"] for each in record["readers"]):
        own = [each for each in record["readers"] if each["kind"] == kind]
        reader.plot(
            [each["readers"] for each in own],
            [each["cpu"] * 1e6 for each in own],
            marker="o",
            label=kind,
        )
    reader.set_title("a step's data, CPU µs of a reader")
    for axes in (tally, memory, reader):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("readers" if axes is reader else "ranks")
        axes.set_ylim(bottom=0)
        if axes is not memory:
            axes.set_yscale("log")
            axes.legend()
    report.save(figure, path)


ABOUT = f"""What a rank's own work costs as ranks and data grow. Ranks are processes of `ddp` over
gloo, all on this machine, so that they share its cores: CPU is what one rank spends (the median
over ranks), wall is how long all take together. A tally is what a step agrees on; over TCP it is
gloo's reduction, as between machines; `exchange` is what ranks send each other when they save. The
fullest rank's own memory is what it shares with no other process, above what it had before the
group was opened.

Samples: one reader of 64 (of fewer, where there are not enough samples) begins in the middle of an
epoch of a shuffled data set, of which nothing is stored; {MICRO_BATCH} samples a microbatch, CPU of
the training process. Readers: one of them takes its {MICRO_BATCH} samples of a global batch of
{MICRO_BATCH} for each. Of what can be indexed a reader computes the order of all, some thousand at
a time, and fetches its own; a stream is read whole by every reader, with the generators seeded for
each sample."""


def section(record: dict[str, Any]) -> str:
    """Return the section of docs/performance.md."""
    command = report.where(record).replace("benchmarks growth", "benchmarks.growth")
    shown = "\n".join(tables(record))
    return (
        f"## What grows with ranks and data\n\n{ABOUT}\n\n{shown}\n{command}\n"
        "![growth](performance/growth.svg)\n"
    )


if __name__ == "__main__":
    typer.run(main)
