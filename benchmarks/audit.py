"""Cost of a run's checks on itself: comparisons of copies of weights, and audits of gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .harness import Benchmark, Column, Measured
from .problems import GPT, SMALL, Batch, Gpt, collate
from .timed_calls import TimedCalls

__all__ = ["BENCHMARKS"]

STEPS = 1000
"""Length of the run over which the cost is spread."""
MESHES = ("tensor", "context", "expert", "pipeline")
CANDIDATES = {
    "ddp": "ddp",
    "fsdp": "fsdp, two replicas",
    **{dimension: f"mesh, {dimension}=2" for dimension in MESHES},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"shard_size": 1},
    **{dimension: {dimension: 2} for dimension in MESHES},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {
        "tensor": {
            "blocks.*.qkv": "column",
            "blocks.*.out": "row",
            "blocks.*.feed.0": "column",
            "blocks.*.feed.2": "row",
        },
        "fused": {"blocks.*.qkv": 3},
    },
    "context": {"sequence": {"inputs": 1, "labels": 1}, "positions": "places"},
    "expert": {"experts": ["blocks.*.feed.experts"]},
}
NUM_EXPERTS, CHOSEN = 4, 2


class Experts(nn.Module):
    """Experts that have as many weights together as the layer that they replace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        hidden = 4 * width // NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, hidden, width) / hidden**0.5)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            own, turn = (indices == expert).nonzero(as_tuple=True)
            answer = F.gelu(tokens[own] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, own, answer * weights[own, turn, None])
        return result


class Mixture(nn.Module):
    """Send each token to the experts that a router chooses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, NUM_EXPERTS, bias=False), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, indices = self.router(tokens).softmax(-1).topk(CHOSEN)
        made: Tensor = self.experts(tokens, indices, weights)
        return made.view_as(x)


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Sum over samples of the mean over positions; also a sum over parts of the positions."""
    mean: Tensor = module(**batch)["loss"]
    return mean * (batch["labels"].numel() / SMALL.sequence)


def measure(candidate: str, quick: bool) -> Measured:
    """Seconds of a step, of an audit, and of the comparison before the first update."""
    from drivetrain import Parallel, Recipe, Settings
    from drivetrain.backends.mesh.audit import GradientAudit
    from drivetrain.kernel.loop import TrainLoop
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.setting_values import override

    steps = 4 if quick else 40
    audits, steppers = TimedCalls(TrainLoop, "audit"), TimedCalls(TrainLoop, "_steps")
    batches = TimedCalls(GradientAudit, "see_batch")
    recipe = Recipe(
        model=partial(Gpt, feed=Mixture) if candidate == "expert" else Gpt,
        loss=loss,
        train_data=GPT.data(),
        collate=collate,
        parallel=Parallel(**PARALLEL.get(candidate, {})),
    )
    settings = override(
        Settings(),
        {"steps": steps, "global_batch": 2 * GPT.batch, "micro_batch": GPT.batch // 2,
         "log_every": 10, "checkpoint.at_end": False},
    )  # fmt: skip
    backend = "mesh" if candidate in MESHES else candidate
    fit(
        recipe,
        settings,
        backend=backend,
        backend_options=OPTIONS[candidate],
        observers=[lambda e: None],
    )
    audit, first = sum(audits.seconds) / len(audits.seconds), sum(batches.seconds)
    step = (sum(steppers.seconds) - first - sum(audits.seconds)) / steps
    logs = {*range(10, STEPS + 1, 10)}
    number = len(logs | {2**n for n in range(STEPS.bit_length())})
    spent = first + number * audit
    return {
        "step": step,
        "audit": audit,
        "first": first,
        "number": number,
        "share": spent / (STEPS * step),
    }


BENCHMARKS = [
    Benchmark(
        "audit",
        "What a run spends on checking itself",
        "Two processes over gloo train the GPT of 10 million parameters, logged every 10 steps. A "
        "step, an audit (copies of weights are compared; see "
        "[how correctness is checked](guides/correctness.md)), and the comparison of the "
        "partitioned model with the whole one before the first update are measured in 40 steps; "
        "the share is that of a run of 1,000 steps, which audits after each log and after updates "
        f"1, 2, 4, 8 and so on. With `expert` {NUM_EXPERTS} experts, of which a token goes to "
        f"{CHOSEN}, have the weights of each hidden layer.",
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
