"""Law 6, changes after an update. `Recipe.after_update` changes shards of weights as plain PyTorch
changes whole weights.

The next forward uses the changed weights, and they are saved and resumed. The check trains a
student whose weights are clipped, and a frozen teacher that follows it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointReader
from ..kernel.errors import CapabilityRefused, RecipeError
from ..trainer.turns import Models
from . import oracle
from .bench import Bench
from .cases import Refused, check
from .experts import InParts
from .judge import require, require_same_bits
from .law_1_groups import EPS, require_near
from .law_1_turns import PARALLEL
from .problems import PROBLEMS, Sample, Samples
from .refusal import problem_for
from .state import read_all
from .subject import Subject

ROWS, STEPS, STOPPED_AT, SEED = 8, 6, 3, 5
LIMIT = 0.3
LR = 0.03
SETTINGS = {
    "steps": STEPS,
    "global_batch": ROWS,
    "micro_batch": 2,
    "seed": SEED,
    "data.shuffle": False,
    "schedule.name": "constant",
    "optimizer.lr": LR,
    "optimizer.args.eps": EPS,
    "checkpoint.every": 1,
    "checkpoint.keep_last": STEPS,
}


def student(problem: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return InParts(model, 3) if PROBLEMS[problem].parallel.experts else model


def taught(problem: str) -> Models:
    """Build a student and a teacher, each with initial weights of its own."""
    teacher = student(problem).requires_grad_(False)
    return Models({"student": student(problem), "teacher": teacher})


def distil(models: Models, batch: Sample) -> Tensor:
    made, taught = models["student"](batch["x"]), models["teacher"](batch["x"])
    loss: Tensor = (made - taught).square().sum() + (made - batch["y"]).square().sum()
    return loss


def follow(weights: Mapping[str, Tensor], number: int) -> None:
    """Clip the student, and move the teacher towards it, further in the first updates."""
    for name, weight in weights.items():
        if name.startswith("student."):
            weight.clamp_(-LIMIT, LIMIT)
    for name, weight in weights.items():
        if name.startswith("teacher."):
            weight.lerp_(weights[name.replace("teacher.", "student.")], 1.0 / (number + 1))


def clip(weights: Mapping[str, Tensor], number: int) -> None:
    """Clip all weights. Each rank may hold other blocks: no weight needs another one."""
    for weight in weights.values():
        weight.clamp_(-LIMIT, LIMIT / number**0.5)


@check()
def weights_are_changed_as_in_one_process(subject: Subject) -> Refused | None:
    """Compare the weights of a run, and of a resumed one, with plain PyTorch in one process. A
    driver that cannot change weights refuses `after_update` by name.
    """
    problem = problem_for(subject, "regression")
    how: dict[str, Any] = {"problem": problem, "untaught": False}
    with tempfile.TemporaryDirectory() as folder:
        saved, why = subject.run(run, out=f"{folder}/straight", **how)[0]
        if why and "after_update" not in why:  # two models in one are what is refused
            how["untaught"] = True
            saved, why = subject.run(run, out=f"{folder}/own", **how)[0]
        if why:
            require("after_update" in why, f"after_update is refused without its name: {why}")
            require(subject.facts.name in why, f"the refusal does not name the driver: {why}")
            return Refused(why)
        straight = read_all(CheckpointReader(saved))
        source = saved.replace(f"{STEPS:06}", f"{STOPPED_AT:06}")
        resumed, _ = subject.run(run, out=f"{folder}/resumed", resume=source, **how)[0]
        again = read_all(CheckpointReader(resumed))
    first, expected = by_hand(**how)
    require_near(straight["weights"], first, expected, off=1e-5)
    require_near(again["weights"], first, expected, off=1e-5)
    for kind in ("weights", "optimizer") if subject.can("exact_resume") else ():
        require_same_bits(f"{kind}, resumed at {STOPPED_AT}", again[kind], straight[kind])
    return None


def run(
    bench: Bench, *, problem: str, out: str, untaught: bool = False, resume: str | None = None
) -> tuple[str, str]:
    """Job that trains all steps; returns the last checkpoint, or the words of a refusal.
    `untaught`: train the problem's own model, without a teacher.
    """
    parts: dict[str, Any] = {"train_data": Samples(problem, ROWS * STEPS), "after_update": clip}
    if not untaught:
        parts |= {
            "model": lambda: taught(problem),
            "loss": lambda module, batch: module(distil, batch),
            "measure": None,
            "after_update": follow,
            "parallel": PARALLEL,
        }
    try:
        result = bench.fit(PROBLEMS[problem].recipe(**parts), SETTINGS, out=out, resume=resume)
    except (CapabilityRefused, RecipeError) as refusal:
        return "", str(refusal)
    return str(result.checkpoint), ""


@oracle.one_thread()
def by_hand(problem: str, untaught: bool) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the weights before and after training by hand, in float64."""
    torch.manual_seed(SEED)
    chosen = PROBLEMS[problem]
    built = (chosen.model() if untaught else taught(problem)).double()
    first = {name: p.detach().clone() for name, p in built.named_parameters()}
    learning = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, LR, eps=EPS, weight_decay=0.0)
    for step in range(STEPS):
        batch = oracle.batch_of(problem, range(step * ROWS, (step + 1) * ROWS))
        if isinstance(built, Models):
            loss = distil(built, batch) / ROWS
        else:
            loss = chosen.loss(built, batch) / chosen.items(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        built.zero_grad()
        with torch.no_grad():
            weights = {name: p.data for name, p in built.named_parameters()}
            (clip if untaught else follow)(weights, step + 1)
    return first, {name: p.detach() for name, p in built.named_parameters()}
