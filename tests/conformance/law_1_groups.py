"""Law 1, groups. Each group of parameters has its own optimizer, learning rate and decay.

The groups come from the settings `optimizer.groups`. Runs, also resumed ones, are compared with
plain PyTorch in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointReader
from ..kernel.errors import UsageError
from . import oracle
from .bench import Bench
from .cases import Refused, check
from .judge import require
from .problems import PROBLEMS, Samples
from .refusal import problem_for
from .resuming import STEPS, compare, record
from .state import read_all
from .subject import Subject

SEED = 3
STOPPED_AT = 4
ELEMENTWISE: list[dict[str, Any]] = [
    {"pattern": "blocks.0.*", "name": "torch.optim.SGD", "lr": 0.1, "args": {"momentum": 0.9}},
    {"pattern": "blocks.1.*", "lr": 0.02, "weight_decay": 0.3},
    {},
]
EPS = 1e-3
"""Epsilon of AdamW; large, since the gradient of the bias of attention's keys is rounding alone."""
Split = Callable[[nn.Module], Iterable[torch.optim.Optimizer]]


def elementwise(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build the optimizers of `ELEMENTWISE` by hand; the settings have a rate of 0.01 else."""
    named = dict(model.named_parameters())

    def of(*prefixes: str) -> list[Tensor]:
        return [p for name, p in named.items() if name.startswith(prefixes)]

    rest = [p for name, p in named.items() if not name.startswith("blocks.")]
    return [
        torch.optim.SGD(of("blocks.0."), lr=0.1, momentum=0.9),
        torch.optim.AdamW(of("blocks.1."), lr=0.02, weight_decay=0.3, eps=EPS),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0, eps=EPS),
    ]


def matrices(problem: str) -> list[dict[str, Any]]:
    """Groups that update the matrices of the blocks by Muon, except those of routers. A softmax
    sees only differences, so one direction of a router's gradient consists of rounding errors,
    which Muon makes as large as any other.
    """
    routers = [{"pattern": "*.router.*"}] if PROBLEMS[problem].parallel.experts else []
    return [
        {"pattern": "embedding.*"},
        {"pattern": "position"},
        *routers,
        {"dims": 2, "name": "torch.optim.Muon", "lr": 0.02, "args": {"momentum": 0.8}},
        {},
    ]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build the optimizers of `matrices` by hand."""
    named = dict(model.named_parameters())
    inner = {n: p for n, p in named.items() if n.startswith("blocks.") and ".router." not in n}
    whole = [p for p in inner.values() if p.dim() == 2]
    rest = [p for p in named.values() if all(p is not each for each in whole)]
    return [
        torch.optim.Muon(whole, lr=0.02, weight_decay=0.0, momentum=0.8),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0, eps=EPS),
    ]


@check()
def each_group_has_its_own_optimizer_and_rate(subject: Subject) -> None:
    """Compare two kinds of optimizer at three rates, resumed, too."""
    prove(subject, ELEMENTWISE, elementwise, off=1e-4)


@check()
def a_matrix_is_updated_whole(subject: Subject) -> Refused | None:
    """Compare matrices updated by Muon and all else by AdamW. A driver that keeps no matrices
    refuses by name; so does any driver where torch is older than Muon.
    """
    problem = problem_for(subject, "language")
    answers = subject.run(refused, problem=problem, groups=matrices(problem))
    ((name, message),) = {tuple(reported) for reported in answers}
    if name:
        require(name in ("CapabilityRefused", "SettingError"), f"{name}: {message}")
        require("Muon" in message, f"the refusal does not name Muon: {message}")
        return Refused(message)
    # it orthogonalises in bfloat16, so that a float32 gradient may round otherwise
    prove(subject, matrices(problem), muon, off=2.0**-5)
    return None


def refused(bench: Bench, *, problem: str, groups: list[dict[str, Any]]) -> tuple[str, str]:
    """Job that trains one step; returns the name and the words of an error that refuses it."""
    recipe = PROBLEMS[problem].recipe(train_data=Samples(problem, 8))
    try:
        bench.fit(recipe, {"steps": 1, "global_batch": 8, "optimizer.groups": groups})
    except UsageError as error:
        return type(error).__name__, str(error)
    return "", ""


def prove(subject: Subject, groups: list[dict[str, Any]], split: Split, off: float) -> None:
    """Compare a run, and a resumed one, with training by hand. `off`: the allowed distance between
    the weights, relative to the way that training by hand took them.
    """
    settings = {
        "optimizer.groups": groups,
        "optimizer.args.eps": EPS,
        "schedule.name": "constant",
        "seed": SEED,
    }
    with tempfile.TemporaryDirectory() as folder:
        problem = problem_for(subject, "language")
        how: dict[str, Any] = {"problem": problem, "settings": settings}
        straight = record(subject, f"{folder}/straight", **how)
        first, weights = by_hand(problem, straight["ids"], split)
        require_near(
            read_all(CheckpointReader(straight["checkpoint"]))["weights"], first, weights, off
        )
        source = straight["checkpoint"].replace(f"{STEPS:06}", f"{STOPPED_AT:06}")
        resumed = record(subject, f"{folder}/resumed", resume=source, **how)
    if subject.can("exact_resume"):
        exact = compare(resumed, straight, last=STEPS - STOPPED_AT)
        require(exact is None, f"resumed at {STOPPED_AT}: {exact}")


def by_hand(
    problem: str, ids: Iterable[list[int]], split: Split
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after training by hand, in float64."""
    torch.manual_seed(SEED)
    model = PROBLEMS[problem].model().double().train()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = list(split(model))
    for step in ids:
        batch = oracle.batch_of(problem, step)
        loss = PROBLEMS[problem].loss(model, batch) / PROBLEMS[problem].items(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return first, {name: p.detach() for name, p in model.named_parameters()}


def require_near(
    found: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    off: float,
) -> None:
    """Require each weight to be nearer to the expected one than `off` times its way there."""
    for name, tensor in expected.items():
        way = float((tensor - first[name]).norm())
        error = float((found[name].double() - tensor).norm())
        require(
            error <= off * way,
            f"{name} went {way:.3g} and is {error:.3g} from where plain PyTorch takes it: "
            f"{error / way:.2g} of the way, allowed {off:.2g}",
        )
