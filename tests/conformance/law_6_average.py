"""Law 6, averages. Averages of the weights are saved, resumed and shown as the weights are.

They are exponential moving averages as `torch.optim.swa_utils` makes them, however the weights are
sharded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..checkpoint import CheckpointReader
from ..checkpoint.averages import AveragedWeights
from . import oracle
from .cases import Refused, check
from .judge import require, require_close, require_same, require_same_bits
from .problems import PROBLEMS
from .refusal import ask, problem_for, refuses
from .resuming import STEPS, compare, record, restore
from .state import assemble, read_all
from .subject import Subject

DECAY = 0.75
MOVED_AT = (4, 6, 8)
SETTINGS = {
    "average.decay": DECAY,
    "average.every": 2,
    "average.start": 3,
    "evaluate.weights": "average",
}
STOPPED_AT = 5


@check()
def averages_are_those_of_plain_torch_after_any_resume(subject: Subject) -> Refused | None:
    """Require averages to be saved, restored bit for bit by any driver, resumed exactly by this
    one, and shown to an evaluation, after which the weights are back.
    """
    problem = problem_for(subject, "language")  # with tied weights
    if subject.run(ask, problem=problem, settings={"average.decay": DECAY})[0] is not None:
        return refuses(subject, "", "average.decay", {"average.decay": DECAY})
    how: dict[str, Any] = {"problem": problem, "settings": SETTINGS, "evaluate": [11]}
    with tempfile.TemporaryDirectory() as folder:
        straight = record(subject, f"{folder}/straight", **how)
        steps = [straight["checkpoint"].replace(f"{STEPS:06}", f"{n + 1:06}") for n in range(STEPS)]
        stored = [read_all(CheckpointReader(step)) for step in steps]
        for number, (step, expected) in enumerate(
            zip(stored, by_hand(problem, stored), strict=True), 1
        ):
            require_averages(f"step {number}", step["optimizer"], expected)
        source = steps[STOPPED_AT - 1]
        resumed = record(subject, f"{folder}/resumed", resume=source, **how)
        for other in (subject, *subject.peers[:1]):
            ranks = other.run(restore, problem=problem, source=source)
            state = assemble([rank["state"] for rank in ranks])["optimizer"]
            what = f"optimizer and averages, restored by {other}"
            require_same_bits(what, state, stored[STOPPED_AT - 1]["optimizer"])
        shown = read_all(AveragedWeights(straight["checkpoint"]))["weights"]
    if subject.can("exact_resume"):
        exact = compare(resumed, straight, last=STEPS - STOPPED_AT)
        require(exact is None, f"resumed at {STOPPED_AT}: {exact}")
    loss = oracle.evaluate(problem, shown, 11)["loss"]
    evaluated = straight["evaluated"][-1]["metrics"]["loss"]
    require_close("loss of the averages", [evaluated], [loss], 1e-6)
    for number, weights in enumerate(straight["shown"]):
        kept = {name: weights[name] for name in stored[-1]["weights"]}
        what = f"weights on rank {number} after the averages were evaluated"
        require_same_bits(what, kept, stored[-1]["weights"])
    return None


def by_hand(
    problem: str,
    stored: Sequence[Mapping[str, Mapping[str, Tensor]]],
) -> list[dict[str, Tensor]]:
    """Return the averages after each step, computed from the weights stored after each."""
    model = PROBLEMS[problem].model()
    moved = get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]
    averaged = AveragedModel(model, multi_avg_fn=moved)
    after = []
    for number, step in enumerate(stored, 1):
        with torch.no_grad():
            for name, tensor in oracle.named(model):
                tensor.copy_(step["weights"][name])
        if number in MOVED_AT:
            averaged.update_parameters(model)
        begun = number >= MOVED_AT[0]
        named = averaged.module.named_parameters()
        after.append({name: p.detach().clone() for name, p in named} if begun else {})
    return after


def require_averages(
    what: str, optimizer: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Require equal averages. Processors may round elements at the end of a tensor's part
    differently.
    """
    found = {
        name.removesuffix("/average"): tensor
        for name, tensor in optimizer.items()
        if name.endswith("/average")
    }
    require_same(f"names of averages, {what}", sorted(found), sorted(expected))
    for name, tensor in expected.items():
        require_same(f"dtype of the average of {name}, {what}", found[name].dtype, torch.float32)
        off = float((found[name] - tensor).abs().max())
        require(off <= 2.0**-23 * float(tensor.abs().max()), f"average of {name}, {what}: {off=}")
