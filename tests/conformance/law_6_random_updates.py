"""Law 6, random updates. What an optimizer draws depends on the run's seed, on the number of the
update, and on the part of the weights that a rank updates.

So ranks that hold the same weights draw alike, ranks that hold other parts draw otherwise, a
resumed run draws what it would have drawn, and neither data nor dropout changes.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint import CheckpointReader
from .cases import Refused, check
from .judge import require, require_same, require_same_bits
from .refusal import problem_for, refuses_optimizer
from .resuming import STEPS, compare, record, recorded
from .state import read_all
from .subject import Subject

NOISY = {
    "optimizer.name": "drivetrain.conformance.optimizers.Noisy",
    "optimizer.args": {"pull": 0.0},
    "schedule.name": "constant",
}
"""Settings of a run whose updates are nothing but noise."""
NOISY_BY_ELEMENT = {**NOISY, "optimizer.name": f"{NOISY['optimizer.name']}ByElement"}
"""Settings for drivers that refuse numbers which are drawn for a whole weight."""


@functools.cache
def noisy_settings(subject: Subject) -> Mapping[str, Any] | Refused:
    """Return settings of a run on this driver, or its refusal of optimizers that draw."""
    if not refuses_optimizer(subject, "Noisy"):
        return NOISY
    return refuses_optimizer(subject, "NoisyByElement") or NOISY_BY_ELEMENT


def noisy(subject: Subject, **settings: Any) -> dict[str, Any] | Refused:
    """Return the arguments of a run on this driver, or its refusal of optimizers that draw."""
    chosen = noisy_settings(subject)
    if isinstance(chosen, Refused):
        return chosen
    return {"problem": problem_for(subject, "dropout"), "settings": {**chosen, **settings}}


@check()
def a_random_update_is_drawn_again_on_resume(subject: Subject) -> Refused | None:
    """Resume on the same world size, and compare all bits."""
    how = noisy(subject)
    if isinstance(how, Refused):
        return how
    with tempfile.TemporaryDirectory() as folder:
        straight = recorded(subject, **how)
        source = straight["checkpoint"].replace(f"{STEPS:06}", "000004")
        resumed = record(subject, f"{folder}/resumed", resume=source, **how)
    if subject.can("exact_resume"):
        exact = compare(resumed, straight, last=STEPS - 4)
        require(exact is None, f"resumed at 4: {exact}")
    return None


@check()
def copies_draw_alike_and_parts_do_not(subject: Subject) -> Refused | None:
    """Compare the noise of each update between ranks, between parts of a weight, and between
    updates.
    """
    how = noisy(subject)
    if isinstance(how, Refused):
        return how
    run = recorded(subject, **how)
    first, *others = run["shown"]
    for number, other in enumerate(others, 1):
        require_same_bits(f"weights on ranks 0 and {number}", other, first)
    states = [
        read_all(CheckpointReader(run["checkpoint"].replace(f"{STEPS:06}", f"{step:06}")))
        for step in range(1, 5)
    ]
    for name in [name for name, value in states[0]["weights"].items() if value.dim() == 2]:
        weights = [state["weights"][name] for state in states]
        noises = [after - before for before, after in itertools.pairwise(weights)]
        require_unlike(f"the noise of {name} in two updates", noises)
        for dim in (0, 1):
            if not noises[0].shape[dim] % (2 * subject.world):
                parts = noises[0].chunk(2 * subject.world, dim)
                require_unlike(f"the noise of {name} in two parts along dimension {dim}", parts)
    return None


def require_unlike(what: str, tensors: Any) -> None:
    """Raises `LawBroken` if two of the tensors are nearly equal."""
    for one, other in itertools.combinations(tensors, 2):
        near = torch.isclose(one, other, rtol=1e-3, atol=1e-6).float().mean()
        require(near < 0.5, f"{what} is the same")


@check()
def random_updates_leave_dropout_alone(subject: Subject) -> Refused | None:
    """Compare the losses of two runs whose rate is zero. In one of them the optimizer draws."""
    how = noisy(subject, **{"optimizer.lr": 0.0})
    if isinstance(how, Refused):
        return how
    drawn = recorded(subject, **how)
    still = {"optimizer.name": "torch.optim.SGD", "optimizer.args": {}}
    plain = recorded(subject, **{**how, "settings": {**how["settings"], **still}})
    losses = [[line["loss"] for line in run["logged"]] for run in (drawn, plain)]
    require_same("losses beside an optimizer that draws", *losses)
    return None
