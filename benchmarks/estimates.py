"""Accuracy of `drivetrain explain` and `plan`: the memory of a step that they expect, and that of
a run."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .harness import Benchmark, Column, Measured, peak_bytes, reset_peak
from .networks import NETWORKS

__all__ = ["BENCHMARKS", "Case"]

STEPS = 4
_BF16 = {"precision": "bf16"}
_MMAP_THRESHOLD = -3  # `M_MMAP_THRESHOLD` of malloc.h


@dataclass(frozen=True)
class Case:
    """A run."""

    network: str
    backend: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    recomputed: bool = False
    """True if the activations of blocks are computed again in the backward."""

    @property
    def title(self) -> str:
        """Its row in a table."""
        words = [f"{name}={value}" for name, value in {**self.options, **self.settings}.items()]
        words += ["recomputed"] * self.recomputed
        shown = " ".join(words).replace("precision=", "")
        return f"{self.network}, {self.backend}{' ' if shown else ''}{shown}"


def _few_in_bf16(samples: int) -> dict[str, Any]:
    """Return settings with few samples: products in bfloat16 are slow on most processors."""
    return {**_BF16, "global_batch": samples}


_ALONE = [
    *(Case(name) for name in NETWORKS),
    Case("autoencoder", settings=_few_in_bf16(4)),
    Case("recommender", settings=_BF16),
    *(Case(name, recomputed=True) for name in ("GPT", "mixer")),
    Case("autoencoder", settings={"micro_batch": 64}),
]
_TOGETHER = [
    Case("GPT", "ddp"),
    Case("autoencoder", "ddp", settings=_few_in_bf16(4)),
    Case("residual", "ddp"),
    Case("recommender", "ddp", settings=_BF16),
    Case("GPT", "fsdp"),
    Case("autoencoder", "fsdp", settings=_few_in_bf16(4)),
    Case("GPT", "fsdp", recomputed=True),
    Case("mixer", "fsdp"),
    Case("recommender", "fsdp", settings=_BF16),
    *(Case("GPT", "deepspeed", {"stage": stage}) for stage in (1, 2, 3)),
    Case("recommender", "deepspeed", {"stage": 2}, _BF16),
    Case("GPT", "mesh", {"tensor": 2}),
    Case("GPT", "mesh", {"tensor": 2}, _few_in_bf16(1)),
    Case("GPT", "mesh", {"tensor": 2}, recomputed=True),
    Case("GPT", "mesh", {"context": 2}),
    Case("mixer", "mesh", {"shard": 2}),
]
CASES = {case.title: case for case in (*_ALONE, *_TOGETHER)}


@dataclass(frozen=True)
class Prepared:
    """A run, and what a plan expects of its steps."""

    recipe: Any
    settings: Any
    expected: Any
    """See `drivetrain.symbolic.step.SymbolicStep`."""


def prepare(case: Case, num_ranks: int, quick: bool, **changes: Any) -> Prepared:
    """Return the run of a case, with a few steps unless `changes` has other settings."""
    from drivetrain import Parallel, Recipe, Settings
    from drivetrain.registry import find_driver
    from drivetrain.symbolic.equal_blocks import find_equal_blocks
    from drivetrain.symbolic.first_batch import first_batch
    from drivetrain.symbolic.step import symbolic_step
    from drivetrain.trainer.setting_values import override

    network = NETWORKS[case.network]
    recipe = Recipe(
        network.model,
        network.loss,
        network.data(),
        collate=network.collate,
        parallel=Parallel(**network.parallel) if network.parallel else None,
    )
    values = {"steps": STEPS, "global_batch": network.batch, "checkpoint.at_end": False}
    values |= case.settings | changes | ({"global_batch": num_ranks} if quick else {})
    if case.recomputed:
        values["activation_checkpointing"] = network.blocks
    settings = override(Settings(), values)
    driver = find_driver(case.backend)
    expected = symbolic_step(
        recipe,
        driver,
        settings.plan(driver.options_type(**case.options)),
        settings,
        num_ranks,
        partial(first_batch, recipe, settings),
        find_equal_blocks(recipe),
    )
    return Prepared(recipe, settings, expected)


def measure(num_ranks: int, title: str, quick: bool) -> Measured:
    """Return the bytes of rank 0 at the fullest moment of a step."""
    from drivetrain.kernel.events import StepEnded
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.setting_values import override

    case = CASES[title]
    run = prepare(case, num_ranks, quick)
    settings, expected = run.settings, run.expected
    train = partial(fit, run.recipe, backend=case.backend, backend_options=case.options)
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 14)  # what is freed is no longer the process's
    unused = reset_peak()
    train(override(settings, {"steps": 1}))  # loads libraries
    gc.collect()
    libc.malloc_trim(0)
    before = reset_peak()

    def note(event: object) -> None:
        if isinstance(event, StepEnded) and event.step == STEPS - 2:
            reset_peak()

    train(settings, observers=[note])
    measured, total = peak_bytes() - before, sum(expected.bytes.values())
    return {
        "expected": total,
        "process": measured,
        "error": total / measured - 1,
        "libraries": before - unused,
        **{f"expected {kind}": value for kind, value in expected.bytes.items()},
    }


def _benchmark(name: str, num_ranks: int, cases: Sequence[Case]) -> Benchmark:
    ranks = "one process" if num_ranks == 1 else f"{num_ranks} processes over gloo"
    return Benchmark(
        name,
        f"Memory that a plan expects, with {ranks}",
        f"Models of more than 50 million parameters are trained by {ranks}. Expected is the "
        "fullest moment of a step, found without memory ([plan a run](guides/plan.md)). Measured "
        "is the growth of the first process's resident memory: its peak in the last two steps of "
        f"{STEPS}, above what it held after a run of one step, which loads libraries. The C "
        "library returns what is freed at once, so that it holds no slack.",
        {case.title: case.title for case in cases},
        partial(measure, num_ranks),
        (
            Column("expected, MB", "expected", scale=1e-6, digits=0),
            Column("measured, MB", "process", scale=1e-6, digits=0),
            Column("error, %", "error", scale=100, digits=1),
        ),
        plotted="error, %",
        processes=num_ranks,
    )


BENCHMARKS = [
    _benchmark("estimates", 1, _ALONE),
    _benchmark("estimates_ranks", 2, _TOGETHER),
]
