"""Law 6. Saving and resuming is bit-exact on the same driver and world size.

On another driver or world size the restored weights and moments are bit-equal, the next loss
agrees, and the order of samples does not change. Tied weights stay tied.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from ..checkpoint import CheckpointReader
from . import oracle
from .cases import Refused, check
from .judge import require, require_close, require_same, require_same_bits
from .problems import PROBLEMS
from .refusal import problem_for, refuses_optimizer
from .resuming import (
    STEPS,
    compare,
    record,
    recorded,
    refuse,
    restore,
)
from .state import KINDS, assemble, read_all
from .subject import Subject


@check(stops=((1,), (3,), (2, 7), (1, 3, 4, 6, 8)))
def resumed_run_is_bit_exact(subject: Subject, stops: tuple[int, ...], **how: Any) -> None:
    """With dropout, resumed in mid-epoch, at its end, before and after its last, partial batch."""
    with tempfile.TemporaryDirectory() as folder:
        straight = recorded(subject, **how)
        resumed = straight
        for number, stop in enumerate(stops):
            source = resumed["checkpoint"].replace(f"{STEPS:06}", f"{stop:06}")
            resumed = record(subject, f"{folder}/{number}", resume=source, **how)
        exact = compare(resumed, straight, last=STEPS - stops[-1])
    if subject.can("exact_resume"):
        require(exact is None, f"resumed at {stops}: {exact}")
    else:
        require(exact is not None, "exact_resume is not declared, and the run was bit-exact")
        losses = [[line["loss"] for line in told["logged"]] for told in (resumed, straight)]
        require_close("loss after resuming", losses[0], losses[1][-len(losses[0]) :], 1e-5)


COUNTING = "drivetrain.conformance.optimizers.Counting"


@check()
def an_optimizer_that_counts_resumes_exactly(subject: Subject) -> Refused | None:
    """What it counts in its groups, its lists and its None are saved, and restored by any driver
    as they were."""
    if refused := refuses_optimizer(subject, "Counting"):
        return refused
    problem = problem_for(subject, "dropout")
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"problem": problem, "settings": {"optimizer.name": COUNTING}}
        straight = recorded(subject, **how)
        source = straight["checkpoint"].replace(f"{STEPS:06}", "000004")
        resumed = record(subject, f"{folder}/resumed", resume=source, **how)
        stored = read_all(CheckpointReader(source))["optimizer"]
        counted = [name for name in stored if name.endswith("/group.k:int")]
        require(counted, f"no {'<fqn>/group.k:int'!r} is stored, but {sorted(stored)}")
        for other in (subject, *subject.peers[:1]):
            ranks = other.run(restore, problem=problem, source=source, optimizer="Counting")
            state = assemble([rank["state"] for rank in ranks])["optimizer"]
            require_same_bits(f"optimizer, restored by {other}", state, stored)
    if subject.can("exact_resume"):
        exact = compare(resumed, straight, last=STEPS - 4)
        require(exact is None, f"resumed at 4: {exact}")
    return None


@check()
def resumed_run_of_three_ranks_is_bit_exact(subject: Subject) -> None:
    """The sum of three numbers depends on their order, that of two does not. With buffers that
    each rank fills from its own samples, and an evaluation that reads them."""
    wide = subject.at(3) if subject.can("multi_process") else subject
    resumed_run_is_bit_exact(wide, (3,), problem="normalised", evaluate=[11])


@check()
def a_parameter_of_no_dimension_moves_between_drivers(subject: Subject) -> None:
    """It and its moments are saved once, and restored by another driver as they were."""
    problem = problem_for(subject, "scaled")
    source = recorded(subject, problem=problem)["checkpoint"]
    stored = read_all(CheckpointReader(source))
    for other in (subject, *subject.peers[:1]):
        ranks = other.run(restore, problem=problem, source=source)
        state = assemble([rank["state"] for rank in ranks])
        for kind in ("weights", "optimizer"):
            require_same_bits(f"{kind}, restored by {other}", state[kind], stored[kind])


@check()
def resumed_run_with_data_workers_is_bit_exact(subject: Subject) -> None:
    """What was fetched ahead of the checkpoint is fetched again."""
    resumed_run_is_bit_exact(subject, (4,), workers=2)


@check()
def a_run_that_saves_behind_training_is_bit_exact(subject: Subject) -> None:
    """What is saved is the state of a step, though later steps change it meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        straight = recorded(subject)["checkpoint"]
        behind = record(subject, f"{folder}/behind", behind=True)["checkpoint"]
        for step in range(1, STEPS + 1):
            stored, expected = (
                read_all(CheckpointReader(last.replace(f"{STEPS:06}", f"{step:06}")))
                for last in (behind, straight)
            )
            for kind in KINDS:
                require_same_bits(f"{kind} of step {step}", stored[kind], expected[kind])


@check(direction=("to", "from"))
def checkpoints_move_between_drivers_and_worlds(subject: Subject, direction: str) -> None:
    """Weights and moments bit-equal, the next losses agree, the samples are the same."""
    problem = problem_for(subject, "language")
    for peer in subject.peers:
        writer, reader = (subject, peer) if direction == "to" else (peer, subject)
        with tempfile.TemporaryDirectory() as folder:
            straight = recorded(writer, problem=problem)
            source = straight["checkpoint"].replace(f"{STEPS:06}", "000004")
            stored = read_all(CheckpointReader(source))
            ranks = reader.run(restore, problem=problem, source=source)
            restored = assemble([rank["state"] for rank in ranks])
            for kind in ("weights", "optimizer"):
                what = f"{kind} written by {writer}, restored by {reader}"
                require_same_bits(what, restored[kind], stored[kind])
            resumed = record(reader, f"{folder}/on", problem=problem, resume=source)
        what = f"written by {writer}, resumed by {reader}"
        require_same(f"samples of each step, {what}", resumed["ids"], straight["ids"][4:])
        losses = [[line["loss"] for line in told["logged"]] for told in (resumed, straight)]
        require_close(f"next loss, {what}", losses[0][:1], losses[1][4:5], 1e-6)
        require_close(f"losses, {what}", losses[0], losses[1][4:], 1e-5)


@check()
def a_checkpoint_is_what_plain_torch_reads(subject: Subject) -> None:
    """Evaluated in plain PyTorch, the stored weights give the metrics of the run."""
    problem = problem_for(subject, "language")
    told = recorded(subject, problem=problem, evaluate=[11])
    weights = read_all(CheckpointReader(told["checkpoint"]))["weights"]
    expected = oracle.evaluate(problem, weights, 11)["loss"]
    require_close("loss", [told["evaluated"][-1]["metrics"]["loss"]], [expected], 1e-6)


@check()
def tied_weights_stay_tied(subject: Subject) -> None:
    """They are stored once, and one parameter still after an update of the restored model."""
    problem = problem_for(subject, "language")
    source = recorded(subject, problem=problem)["checkpoint"]
    stored = CheckpointReader(source).names("weights")
    ranks = subject.run(restore, problem=problem, source=source, updates=True)
    for rank in ranks:
        groups = [sorted(group) for group in rank["tied"]]
        require_same("tied groups", groups, [["embedding.weight", "head.weight"]])
        first, *others = rank["tied"][0]
        require(first in stored, f"{first} is not stored")
        written = {piece["name"] for piece in rank["state"]}
        for name in others:
            require(name not in written, f"{name} is stored too")
            a, b = rank["whole"][first], rank["whole"][name]
            require_same_bits("tied weights after an update", {name: b}, {name: a})


@check()
def whole_weights_are_those_that_are_stored(subject: Subject) -> None:
    """`full_params` on every rank, and the shards of all ranks together."""
    problem = problem_for(subject, "language")
    source = recorded(subject, problem=problem)["checkpoint"]
    ranks = subject.run(restore, problem=problem, source=source, updates=True)
    weights = assemble([rank["state"] for rank in ranks])["weights"]
    size = sum(p.numel() for p in PROBLEMS[problem].model().parameters())
    for number, rank in enumerate(ranks):
        require_same("num_parameters, of the whole model", rank["num_parameters"], size)
        whole = {name: rank["whole"][name] for name in weights}
        require_same_bits(f"full_params on rank {number}", whole, weights)


@check()
def another_model_is_refused_before_anything_changes(subject: Subject) -> None:
    """`CheckpointMismatch`, and weights and optimizer are as they were."""
    source = recorded(subject, problem="language")["checkpoint"]
    other = problem_for(subject, "regression")
    for rank in subject.run(refuse, problem=other, source=source, optimizer="AdamW"):
        require_refused("another model", rank["as it is"], "CheckpointMismatch", "")


@check(optimizer=("SGD", "Adagrad"))
def another_optimizer_is_refused_before_anything_changes(subject: Subject, optimizer: str) -> None:
    """`CheckpointMismatch` for AdamW's state, which one of them would ignore, and the other fail
    on; and weights and optimizer are as they were."""
    problem = problem_for(subject, "regression")
    source = recorded(subject, problem=problem)["checkpoint"]
    for rank in subject.run(refuse, problem=problem, source=source, optimizer=optimizer):
        require_refused("AdamW's state", rank["as it is"], "CheckpointMismatch", "exp_avg")


DAMAGE = {
    "missing": "CheckpointDamaged",
    "misshapen": "CheckpointDamaged",
    "no number": "CheckpointDamaged",
    "of nobody": "CheckpointMismatch",
}
"""What may be wrong with an entry of the optimizer's state, and the error that names it."""


@check()
def a_damaged_optimizer_state_is_refused_before_anything_changes(subject: Subject) -> None:
    """The error names the entry, and weights and optimizer are as they were."""
    problem = problem_for(subject, "regression")
    source = recorded(subject, problem=problem)["checkpoint"]
    ranks = subject.run(
        refuse, problem=problem, source=source, optimizer="AdamW", damage=list(DAMAGE)
    )
    for rank in ranks:
        for damage, error in DAMAGE.items():
            require_refused(f"an entry that is {damage}", rank[damage], error, "4.weight")


def require_refused(what: str, told: Mapping[str, Any], error: str, named: str) -> None:
    require_same(f"error for {what}", told["error"], error)
    require(named in told["message"], f"the error for {what} does not name {named}: {told}")
    require(
        told["unchanged"],
        f"restore refused {what}, and had changed weights or optimizer by then",
    )


@check(optimizer=("AdamW", "Adagrad"))
def weights_alone_can_be_restored(subject: Subject, optimizer: str) -> None:
    """Of a checkpoint without optimizer tensors the weights are taken, and the optimizer, which has
    stepped, is as it was when it was built."""
    problem = problem_for(subject, "language")
    source = recorded(subject, problem=problem)["checkpoint"]
    stored = read_all(CheckpointReader(source))
    ranks = subject.run(
        restore,
        problem=problem,
        source=source,
        weights_only=True,
        stepped=True,
        optimizer=optimizer,
    )
    fresh, after = (assemble([rank[when] for rank in ranks]) for when in ("fresh", "state"))
    require_same_bits("weights", after["weights"], stored["weights"])
    require_same_bits("optimizer", after["optimizer"], fresh["optimizer"])
