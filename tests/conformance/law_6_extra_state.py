"""Law 6, state outside of parameters and buffers. What modules return from `get_extra_state`, and
what hooks add to their `state_dict`, is saved and restored like buffers, by the model's own names.

Where ranks have different values, each keeps its own in a run with as many ranks. In another run
all ranks take rank 0's.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CheckpointReader
from ..kernel.shards import Kind
from .bench import Bench
from .cases import check
from .jobs import optimizer_called
from .judge import require, require_close, require_same, require_same_bits
from .problems import PROBLEMS
from .refusal import problem_for
from .resuming import STEPS, WeightsAlone, compare, record, recorded, restore
from .state import assemble, pieces, read_all
from .subject import Subject


@check(stop=(1, 4))
def a_resumed_run_has_the_extra_state(subject: Subject, stop: int) -> None:
    """Resume in mid-epoch, and compare the losses, which depend on this state, and its bits."""
    problem = problem_for(subject, "remembering")
    with tempfile.TemporaryDirectory() as folder:
        straight = recorded(subject, problem=problem)
        source = straight["checkpoint"].replace(f"{STEPS:06}", f"{stop:06}")
        resumed = record(subject, f"{folder}/resumed", problem=problem, resume=source)
    logged = [[line["loss"] for line in reported["logged"]] for reported in (resumed, straight)]
    require_close("loss after resuming", logged[0], logged[1][stop:], 1e-5)
    if subject.can("exact_resume"):
        exact = compare(resumed, straight, last=STEPS - stop)
        require(exact is None, f"resumed at {stop}: {exact}")


@check(direction=("to", "from"))
def extra_state_moves_between_drivers_and_worlds(subject: Subject, direction: str) -> None:
    """Require rank 0's values, by the same names, wherever a checkpoint is restored."""
    problem = problem_for(subject, "remembering")
    for peer in subject.peers:
        writer, reader = (subject, peer) if direction == "to" else (peer, subject)
        straight = recorded(writer, problem=problem)
        source = straight["checkpoint"].replace(f"{STEPS:06}", "000004")
        state = read_all(CheckpointReader(source))["state"]
        others = {name.rpartition("/")[0] for name in state if name.startswith("extra.")}
        owners = {name.rpartition(".")[0] for name in others}
        alike = sorted(name for name in owners if not name.endswith("body.0.0"))
        require(not alike, f"ranks agree on {alike}, which each of them has stored")
        stored = of_rank_0(state)
        ranks = reader.run(restore, problem=problem, source=source)
        restored = of_rank_0(assemble([rank["state"] for rank in ranks])["state"])
        what = f"extra state written by {writer}, restored by {reader}"
        keys = sorted({name.rpartition("/")[0].rpartition(".")[2] for name in stored})
        require_same("last parts of keys that are stored", keys, ["_extra_state", "sums"])
        require_same_bits(what, restored, stored)


@check()
def a_checkpoint_without_it_leaves_it_alone(subject: Subject) -> None:
    """Require that a checkpoint of a model without extra state, such as an earlier version wrote,
    is restored."""
    problem = problem_for(subject, "remembering")
    source = recorded(subject, problem=problem)["checkpoint"]
    stored = read_all(CheckpointReader(source))
    ranks = subject.run(restore_without, problem=problem, source=source)
    state: dict[str, Any] = assemble([rank["state"] for rank in ranks])
    fresh = assemble([rank["fresh"] for rank in ranks])
    require_same_bits("weights", state["weights"], stored["weights"])
    require_same_bits("extra state", of_rank_0(state["state"]), of_rank_0(fresh["state"]))


def of_rank_0(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the extra state of rank 0 among entries of the kind `state`. A driver notes of a
    tensor that it was on a device, which is left out here."""
    found = {name: tensor for name, tensor in state.items() if name.startswith("extra/")}
    for name, tensor in found.items():
        if name.endswith("/json"):
            text = bytes(tensor.tolist()).replace(b'"device tensor"', b'"tensor"')
            found[name] = torch.tensor(list(text), dtype=torch.uint8)
    return found


class WithoutExtraState(WeightsAlone):
    """A `Reader` of a checkpoint of weights that holds no extra state."""

    def names(self, kind: Kind) -> Any:
        found = super().names(kind)
        return [name for name in found if kind != "state" or not name.startswith("extra")]


def restore_without(bench: Bench, *, problem: str, source: str) -> dict[str, Any]:
    """Job that restores a checkpoint without its extra state, and returns the state before and
    after."""
    with bench.open() as session:
        engine = session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD")))
        fresh = pieces(engine)
        engine.restore(WithoutExtraState(CheckpointReader(source)))
        return {"fresh": fresh, "state": pieces(engine)}
