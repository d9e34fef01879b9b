"""Law 5, predictions. Each sample's outputs come once, in the order of the data, on any world size.

Only the rank that asks receives them, in chunks: no rank needs to hold them all.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from ..data.open_dataset import once, open_dataset
from ..trainer.predictions import Chunk, gather_predictions
from . import oracle
from .bench import Bench
from .cases import check
from .jobs import optimizer_called
from .judge import require, require_same
from .problems import PROBLEMS, Sample, Samples, collate
from .refusal import problem_for
from .state import assemble, pieces
from .subject import Subject

MICRO_BATCH = 4
PADDING = -7


@check(problem=("classification", "language"))
def each_sample_once_in_order(subject: Subject, problem: str) -> None:
    """Require each sample once for data sets whose sizes are near multiples of a microbatch and of
    the world, fewer samples than ranks included. Rows of uneven width are filled up.
    """
    problem, part = problem_for(subject, problem), MICRO_BATCH * subject.world
    for size in sorted({1, 2, part - 1, part, part + 1, 3 * part + 2}):
        ranks = subject.run(outputs, problem=problem, samples=size)
        weights = assemble([rank["state"] for rank in ranks])["weights"]
        expected = oracle.outputs(problem, weights, size)
        for rank, answer in enumerate(ranks):
            what = f"over {size} samples on rank {rank}"
            ids, wide, (output,) = (answer["outputs"][name] for name in ("id", "wide", "output"))
            require_same(f"samples {what}", ids.tolist(), list(range(size)))
            for index, row in enumerate(wide.tolist()):
                filled = row.index(PADDING) if PADDING in row else len(row)
                mine = row[:filled] == [index] * filled and row[filled:] == [PADDING] * (
                    len(row) - filled
                )
                require(filled and mine, f"row of sample {index} {what}: {row}")
            require_same(f"shape {what}", tuple(output.shape), tuple(expected.shape))
            deviation = float((output.double() - expected).abs().max() / expected.abs().max())
            require(deviation < 1e-5, f"outputs {what} deviate by {deviation}")


@check()
def only_who_asks_is_given_them(subject: Subject) -> None:
    """Require that only the rank that asks receives the outputs, in chunks that come in order."""
    ranks = subject.run(chunks, problem=problem_for(subject, "regression"), samples=23)
    for rank, answer in enumerate(ranks):
        expected = list(range(23)) if rank == 0 else []
        require_same(f"samples handed to rank {rank}", answer["ids"], expected)
        require_same(f"first samples of chunks on rank {rank}", answer["firsts"], answer["found"])


@check()
def memory_of_chunks_does_not_grow_with_the_data(subject: Subject) -> None:
    """Count the outputs alive at once, for a data set and one ten times as large, as for
    evaluation.
    """
    problem = problem_for(subject, "regression")
    runs = (subject.run(chunks, problem=problem, samples=samples) for samples in (40, 400))
    peaks = [max(answer["peak"] for answer in ranks) for ranks in runs]
    require(peaks[1] <= 2 * peaks[0], f"outputs alive at once with 40 and 400 samples: {peaks}")


def outputs(bench: Bench, *, problem: str, samples: int) -> dict[str, Any]:
    """Job that gathers all outputs on every rank."""

    def forward(module: nn.Module, batch: Sample) -> dict[str, Any]:
        ids = batch["id"]
        width = samples % 3 + 1 + len(ids) % 2  # not the same in every batch, nor on every rank
        output = module(batch["x"])
        return {"id": ids, "wide": ids[:, None].expand(-1, width), "output": [output]}

    with bench.open() as session:
        engine = session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD")))
        groups = samples_of(bench, session, problem, samples)
        found = gather_predictions(
            session, engine, forward, groups, groups_in_chunk=2, padding=PADDING
        )
        return {"outputs": found, "state": pieces(engine)}


def chunks(bench: Bench, *, problem: str, samples: int) -> dict[str, Any]:
    """Job that returns the samples handed to this rank, and the most outputs alive at one time."""
    ids: list[int] = []
    firsts: list[int] = []
    found: list[int] = []
    alive: set[int] = set()
    peak = 0

    def watch(tensor: Tensor) -> Tensor:
        nonlocal peak
        alive.add(id(tensor))
        weakref.finalize(tensor, alive.discard, id(tensor))
        peak = max(peak, len(alive))
        return tensor

    def forward(module: nn.Module, batch: Sample) -> Tensor:
        module(batch["x"])
        return watch(batch["id"] + 0)

    def receive(chunk: Chunk) -> None:
        watch(chunk.outputs)
        firsts.append(chunk.first)
        found.append(int(chunk.outputs[0]))
        ids.extend(chunk.outputs.tolist())

    with bench.open() as session:
        recipe = PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD"))
        engine = session.prepare(recipe)
        groups = samples_of(bench, session, problem, samples)
        options: dict[str, Any] = {"groups_in_chunk": 2, "ranks": [0], "receive": receive}
        nothing = gather_predictions(session, engine, forward, groups, **options)
    require(nothing is None, "outputs were both handed over and returned")
    return {"ids": ids, "firsts": firsts, "found": found, "peak": peak}


def samples_of(bench: Bench, session: Any, problem: str, samples: int) -> Any:
    source = open_dataset(
        Samples(problem, samples),
        session,
        seed=0,
        workers=0,
        collate=collate,
        global_batch=MICRO_BATCH * session.world.num_readers,
        micro_batch=MICRO_BATCH,
        fixed_size=bench.driver.capabilities(bench.plan()).static_shapes,
    )
    return once(source)
