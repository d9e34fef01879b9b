"""Law 6, where memory runs out: the step is done in smaller microbatches, and nothing else changes.

A process by itself goes on with them; where there are others, the next start does.
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
"""Of a microbatch, on each feeder."""


@check()
def a_step_that_does_not_fit_is_cut_smaller(subject: Subject) -> None:
    """Microbatches of a quarter: the same samples, losses and norms in each step."""
    straight = train(subject)
    with tempfile.TemporaryDirectory() as folder:
        starts = [train(subject, out=folder, room=ROWS // 4)]
        while starts[-1][0].get("error") and len(starts) < 4:
            again = {"out": folder, "resume": "auto", "room": ROWS // 4}
            starts.append(train(subject, **again))
    for number, start in enumerate(starts[:-1]):
        for told in start:
            require("out of memory in step" in told["error"], f"start {number}: {told['error']!r}")
    require(not starts[-1][0].get("error"), f"start {len(starts)}: {starts[-1][0]}")
    require_same("starts", len(starts), 1 if subject.world == 1 else 3)
    figures = {line["step"]: line for start in starts for line in start[0]["logged"]}
    require_same("logged steps", sorted(figures), [line["step"] for line in straight[0]["logged"]])
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in straight[0]["logged"]]
        require_close(name, [line[name] for _, line in sorted(figures.items())], expected, 1e-6)
    for rank, told in enumerate(straight):
        ids = [samples for start in starts for samples in start[rank]["ids"]]
        require_same(f"samples of each step on rank {rank}", ids, told["ids"])


def train(subject: Subject, **how: Any) -> list[dict[str, Any]]:
    """What each rank tells of such a run; it saves after each step."""
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
