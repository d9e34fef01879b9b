"""Law 6, memory. A step that does not fit runs in smaller microbatches; nothing else changes.

A single process goes on with them at once. With several ranks, the next start takes them.
"""

from __future__ import annotations

import tempfile
from typing import Any

from .cases import check
from .judge import require, require_close, require_same
from .refusal import problem_for
from .runs import run
from .subject import Subject

ROWS = 8
"""Samples of a microbatch, on each feeder."""


@check()
def a_step_that_does_not_fit_is_cut_smaller(subject: Subject) -> None:
    """Give memory for a quarter of a microbatch; require the same samples, losses and norms in each
    step.
    """
    straight = train(subject)
    with tempfile.TemporaryDirectory() as folder:
        starts = [train(subject, out=folder, room=ROWS // 4)]
        while starts[-1][0].get("error") and len(starts) < 4:
            again = {"out": folder, "resume": "auto", "room": ROWS // 4}
            starts.append(train(subject, **again))
    for number, start in enumerate(starts[:-1]):
        for reported in start:
            require(
                "out of memory in step" in reported["error"],
                f"start {number}: {reported['error']!r}",
            )
    require(not starts[-1][0].get("error"), f"start {len(starts)}: {starts[-1][0]}")
    require_same("starts", len(starts), 1 if subject.world == 1 else 3)
    figures = {line["step"]: line for start in starts for line in start[0]["logged"]}
    require_same("logged steps", sorted(figures), [line["step"] for line in straight[0]["logged"]])
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in straight[0]["logged"]]
        require_close(name, [line[name] for _, line in sorted(figures.items())], expected, 1e-6)
    for rank, reported in enumerate(straight):
        ids = [samples for start in starts for samples in start[rank]["ids"]]
        require_same(f"samples of each step on rank {rank}", ids, reported["ids"])


def train(subject: Subject, **how: Any) -> list[dict[str, Any]]:
    """Train, saving after each step; return the record of each rank."""
    settings = {
        "steps": 6,
        "global_batch": ROWS * subject.world,
        "log_every": 1,
        "optimizer.lr": 0.01,
        "checkpoint.every": 1,
    }
    samples = 3 * ROWS * subject.world
    problem = problem_for(subject, "regression")
    return subject.run(run, problem=problem, samples=samples, settings=settings, **how)
