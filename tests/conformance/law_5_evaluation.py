"""Law 5. Evaluation does not change a bit of the training.

Metrics are the same for any world size and any remainder. A duplicate is never counted, and memory
does not grow with the data set.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointReader
from . import oracle
from .bench import Bench
from .cases import check
from .judge import require, require_close, require_same, require_same_bits
from .problems import PROBLEMS, Sample, Samples
from .refusal import problem_for
from .runs import run
from .state import KINDS, read_all
from .subject import Subject

SETTINGS = {"steps": 6, "global_batch": 6, "micro_batch": 2, "log_every": 1}


@check(every=(1, 2))
def training_is_bitwise_the_same(subject: Subject, every: int) -> None:
    """Compare a run that evaluates on the way with one that does not, with dropout: weights,
    buffers, optimizer state and random state.
    """
    with tempfile.TemporaryDirectory() as folder:
        problem, states, logs = problem_for(subject, "dropout"), [], []
        for name, settings in (("with", {"evaluate.every": every}), ("without", {})):
            evaluate = [1, 5] if settings else []
            ranks = subject.run(
                run,
                problem=problem,
                samples=15,
                settings={**SETTINGS, **settings},
                evaluate=evaluate,
                out=f"{folder}/{name}",
            )
            states.append(read_all(CheckpointReader(ranks[0]["checkpoint"])))
            logs.append([(line["loss"], line["grad_norm"]) for line in ranks[0]["logged"]])
    require_no_draws(*(state["state"] for state in states))
    require_same("losses and norms with evaluation, and without", *logs)
    for kind in KINDS:
        require_same_bits(f"{kind} with evaluation, and without", states[0][kind], states[1][kind])


def require_no_draws(evaluated: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    """Require unchanged random state, which is saved as `rng/RANK/GENERATOR`."""
    moved = [
        name.split("/")[1:]
        for name, state in plain.items()
        if name.startswith("rng/") and not torch.equal(state, evaluated[name])
    ]
    reported = ", ".join(f"{generator!r} of rank {rank}" for rank, generator in moved)
    require(
        not moved,
        f"evaluation drew random numbers and did not put them back, so that training continues "
        f"with others: generators {reported}. Look at Session.rng_state and set_rng_state",
    )


@check(problem=("classification", "language", "dropout"))
def metrics_are_those_of_one_process(subject: Subject, problem: str) -> None:
    """Compare metrics of data sets whose sizes are near multiples of a microbatch and of the world,
    fewer samples than ranks included. Sums over samples and classes must be exact.
    """
    problem, part = problem_for(subject, problem), 2 * subject.world
    sizes = sorted({1, 2, part - 1, part, part + 1, 3 * part - 1, 3 * part + 1})
    ranks = subject.run(
        run,
        problem=problem,
        samples=12,
        settings={**SETTINGS, "steps": 2},
        evaluate=sizes,
    )
    for size, *reported in zip(sizes, *(rank["evaluated"] for rank in ranks), strict=True):
        metrics = reported[0]["metrics"]
        for rank, other in enumerate(reported):
            require_same(f"metrics over {size} samples on rank {rank}", other["metrics"], metrics)
        expected = oracle.evaluate(problem, ranks[0]["weights"], size)
        require_same(f"metrics over {size} samples", sorted(metrics), sorted(expected))
        for name, value in expected.items():
            what = f"{name} over {size} samples"
            require_close(what, [metrics[name]], [value], 1e-6 if name == "loss" else 0.0)


@check()
def memory_does_not_grow_with_the_data(subject: Subject) -> None:
    """Count the batches and results alive at once, for a data set and one ten times as large.
    Threads decide when the last microbatch is freed, so the larger count may be twice the other.
    """
    problem = problem_for(subject, "regression")
    peaks = [max(subject.run(peak, problem=problem, samples=samples)) for samples in (40, 400)]
    require(peaks[1] <= 2 * peaks[0], f"tensors alive at once with 40 and 400 samples: {peaks}")


def peak(bench: Bench, *, problem: str, samples: int) -> int:
    """Job that returns the largest number of evaluation's tensors alive at one time."""
    chosen = PROBLEMS[problem]
    alive: set[int] = set()
    largest = 0

    def measure(module: nn.Module, batch: Sample) -> dict[str, Tensor]:
        nonlocal largest
        measured = chosen.measure(module, batch)
        for tensor in (*batch.values(), *measured.values()):
            alive.add(id(tensor))
            weakref.finalize(tensor, alive.discard, id(tensor))
        largest = max(largest, len(alive))
        return measured

    settings: dict[str, Any] = {"steps": 1, "global_batch": 8, "evaluate.micro_batch": 2}
    recipe = chosen.recipe(
        measure=measure,
        train_data=Samples(problem, 8),
        eval_data={"eval": Samples(problem, samples)},
    )
    bench.fit(recipe, settings)
    return largest
