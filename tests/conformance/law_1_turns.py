"""Law 1, turns. If updates take turns, each trains its own models alone, by their own optimizer.

All other models are constants in its loss, and keep their bits. Runs by `drivetrain.Turns`, also
those resumed amid the turns, are compared with loops by hand in plain PyTorch.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..checkpoint import CheckpointReader
from ..data.parallel import Parallel
from ..kernel.errors import CapabilityRefused
from ..kernel.events import Logged
from ..trainer.turns import Models, Turns
from . import oracle
from .bench import Bench
from .cases import Refused, check
from .experts import InParts
from .judge import require, require_same_bits
from .law_1_groups import EPS, require_near
from .problems import PROBLEMS, Sample, Samples
from .refusal import problem_for
from .state import read_all
from .subject import Subject

ROWS, STEPS, STOPPED_AT, SEED = 8, 7, 4, 3
LOG_EVERY = 3
ORDER = ("critic", "critic", "maker")
GROUPS: list[dict[str, Any]] = [
    {"pattern": "critic.*", "lr": 0.05, "weight_decay": 0.1},
    {"pattern": "maker.*", "lr": 0.02},
]
SETTINGS = {
    "steps": STEPS,
    "global_batch": ROWS,
    "micro_batch": 2,
    "seed": SEED,
    "data.shuffle": False,
    "schedule.name": "constant",
    "optimizer.groups": GROUPS,
    "optimizer.args.eps": EPS,
    "checkpoint.every": 1,
    "checkpoint.keep_last": STEPS,
    "evaluate.every": 2,
    "log_every": LOG_EVERY,
}


PARALLEL = Parallel(
    tensor={"*.0": "column", "*.2": "row"}, experts=["*.experts"], sequence={"x": 1, "y": 1}
)
"""Partition plan of both models. Experts and sequences exist only in problems "in parts"."""


def models(problem: str = "regression") -> Models:
    """Two models: a maker of outputs, and a critic that distinguishes them from the right ones."""
    made: dict[str, nn.Module] = {
        "maker": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        "critic": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
    }
    if PROBLEMS[problem].parallel.experts:
        made = {"maker": InParts(made["maker"], 3), "critic": InParts(made["critic"], 1)}
    return Models(made)


def of_critic(models: Models, batch: Sample) -> Tensor:
    """Loss of the critic, which is called twice; the maker's output has no gradient."""
    with torch.no_grad():
        made = models["maker"](batch["x"])
    wrong, right = models["critic"](made), models["critic"](batch["y"])
    return (softplus(wrong) + softplus(-right)).sum()


def of_maker(models: Models, batch: Sample) -> Tensor:
    """Loss of the maker, whose gradient flows through the critic."""
    loss: Tensor = softplus(-models["critic"](models["maker"](batch["x"]))).sum()
    return loss


LOSSES = {"critic": of_critic, "maker": of_maker}


@check()
def each_update_trains_its_own_models(subject: Subject) -> Refused | None:
    """Compare with loops by hand, with evaluations in between, resumed, too. A log holds the loss
    of each turn. A driver without turns refuses them by name.
    """
    problem = problem_for(subject, "regression")
    with tempfile.TemporaryDirectory() as folder:
        straight, logs = subject.run(run, problem=problem, out=f"{folder}/straight")[0]
        if not logs:
            require("Turns" in straight, f"turns are refused without their name: {straight}")
            return Refused(straight)
        states = [state_of(straight, step) for step in range(1, STEPS + 1)]
        first, expected, losses = by_hand(problem)
        require_near(states[-1]["weights"], first, expected, off=1e-5)
        for step, (before, after) in enumerate(itertools.pairwise(states), 2):
            held = "critic" if ORDER[(step - 1) % len(ORDER)] == "maker" else "maker"
            for kind in ("weights", "optimizer"):
                what = f"{kind} of the {held} in step {step}, which trains the other"
                require_same_bits(what, part(after[kind], held), part(before[kind], held))
        source = str(checkpoint(straight, STOPPED_AT))
        on: dict[str, Any] = {"problem": problem, "out": f"{folder}/resumed", "resume": source}
        resumed, later = subject.run(run, **on)[0]
        again = state_of(resumed, STEPS)
    require_near(again["weights"], first, expected, off=1e-5)
    require_losses(logs, losses)
    require_losses(later, losses)
    for kind in ("weights", "optimizer") if subject.can("exact_resume") else ():
        require_same_bits(f"{kind}, resumed at {STOPPED_AT}", again[kind], states[-1][kind])
    return None


def require_losses(logs: list[tuple[int, dict[str, float]]], losses: list[float]) -> None:
    """Require the mean loss of each turn since the log before, steps before a resume included."""
    for step, reported in logs:
        steps = range((step - 1) // LOG_EVERY * LOG_EVERY, step)
        for name in {ORDER[i % len(ORDER)] for i in steps}:
            own = [losses[i] for i in steps if ORDER[i % len(ORDER)] == name]
            mean = sum(own) / len(own)
            ok = abs(reported.get(name, math.inf) - mean) <= 1e-4 * abs(mean)
            assert ok, f"log of step {step}: {reported}, where the loss of the {name} is {mean}"


def run(
    bench: Bench, *, out: str, problem: str = "regression", resume: str | None = None
) -> tuple[str, list[tuple[int, dict[str, float]]]]:
    """Job that trains all steps; returns the last checkpoint, and the step and losses of each log.
    Where turns are refused, returns the words of the refusal and no logs.
    """
    logs: list[tuple[int, dict[str, float]]] = []

    def observe(event: Any) -> None:
        if isinstance(event, Logged):
            logs.append((event.step, dict(event.losses)))

    turns = Turns(LOSSES, order=ORDER)
    recipe = PROBLEMS[problem].recipe(
        model=lambda: models(problem),
        loss=turns,
        measure=turns.measure,
        train_data=Samples(problem, ROWS * STEPS),
        eval_data={"some": Samples(problem, 3)},
        parallel=PARALLEL,
    )
    try:
        result = bench.fit(recipe, SETTINGS, out=out, resume=resume, observers=[observe])
    except CapabilityRefused as refusal:
        return str(refusal), []
    return str(result.checkpoint), logs


def checkpoint(last: str, step: int) -> Path:
    return Path(last.replace(f"{STEPS:06}", f"{step:06}"))


def state_of(last: str, step: int) -> dict[str, dict[str, Tensor]]:
    return read_all(CheckpointReader(checkpoint(last, step)))


def part(state: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith(f"{model}.")}


@oracle.one_thread()
def by_hand(
    problem: str = "regression",
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], list[float]]:
    """Train by hand in float64, with an optimizer for each model; return the weights before and
    after, and each step's loss.
    """
    torch.manual_seed(SEED)
    built = models(problem).double()
    first = {name: p.detach().clone() for name, p in built.named_parameters()}
    optimizers = {
        "critic": torch.optim.AdamW(built["critic"].parameters(), 0.05, eps=EPS, weight_decay=0.1),
        "maker": torch.optim.AdamW(built["maker"].parameters(), 0.02, eps=EPS, weight_decay=0.0),
    }
    losses = []
    for step in range(STEPS):
        name = ORDER[step % len(ORDER)]
        batch = oracle.batch_of(problem, range(step * ROWS, (step + 1) * ROWS))
        loss = LOSSES[name](built, batch) / ROWS
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(built[name].parameters(), 1.0)
        optimizers[name].step()
        built.zero_grad()
    return first, {name: p.detach() for name, p in built.named_parameters()}, losses
