"""Cost of a run's checks on itself: comparisons of copies of weights, and audits of gradients."""

from __future__ import annotations

import time
from typing import Any

from .harness import Benchmark, Column, Measured
from .problems import GPT, collate

__all__ = ["BENCHMARKS"]

STEPS = 1000
"""Length of the run over which the cost is spread."""
CANDIDATES = {
    "ddp": "ddp",
    "fsdp": "fsdp, two replicas",
    "pipeline": "mesh, pipeline=2",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"shard_size": 1},
    "pipeline": {"pipeline": 2},
}


class _Spent:
    """Wall seconds inside of a method, and its calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self.calls, method = 0.0, 0, getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        setattr(owner, name, timed)


def measure(candidate: str, quick: bool) -> Measured:
    """Seconds of a step, of an audit, and of the comparison before the first update."""
    from drivetrain import Recipe, Settings
    from drivetrain.backends.mesh.audit import GradientAudit
    from drivetrain.kernel.loop import TrainLoop
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.setting_values import override

    steps = 4 if quick else 40
    audits, steppers = _Spent(TrainLoop, "audit"), _Spent(TrainLoop, "_steps")
    first = _Spent(GradientAudit, "see_batch")
    recipe = Recipe(model=GPT.model, loss=GPT.sum, train_data=GPT.data(), collate=collate)
    settings = override(
        Settings(),
        {"steps": steps, "global_batch": 2 * GPT.batch, "micro_batch": GPT.batch // 2,
         "log_every": 10, "checkpoint.at_end": False},
    )  # fmt: skip
    backend = "mesh" if candidate == "pipeline" else candidate
    fit(
        recipe,
        settings,
        backend=backend,
        backend_options=OPTIONS[candidate],
        observers=[lambda e: None],
    )
    step = (steppers.seconds - first.seconds - audits.seconds) / steps
    logs = {*range(10, STEPS + 1, 10)}
    number = len(logs | {2**n for n in range(STEPS.bit_length())})
    spent = first.seconds + number * audits.seconds / audits.calls
    return {
        "step": step,
        "audit": audits.seconds / audits.calls,
        "first": first.seconds,
        "number": number,
        "share": spent / (STEPS * step),
    }


BENCHMARKS = [
    Benchmark(
        "audit",
        "What a run spends on checking itself",
        "Two processes over gloo train the GPT of 10 million parameters, logged every 10 steps. A "
        "step, an audit (copies of weights are compared; see "
        "[how correctness is checked](guides/correctness.md)), and the comparison of the cut model "
        "with the whole one before the first update are measured in 40 steps; the share is that of "
        "a run of 1,000 steps, which audits after each log and after updates 1, 2, 4, 8 and so on.",
        CANDIDATES,
        measure,
        (
            Column("a step, ms", "step", scale=1e3, digits=0),
            Column("an audit, ms", "audit", scale=1e3),
            Column("before the first update, ms", "first", scale=1e3, digits=0),
            Column("% of 1,000 steps", "share", scale=100),
        ),
        plotted="% of 1,000 steps",
        processes=2,
    )
]
