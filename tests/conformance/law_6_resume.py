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
    recorded_language,
    refuse,
    restore,
)
from .state import KINDS, assemble, read_all
from .subject import Subject


@check(stops=((1,), (3,), (2, 7), (1, 3, 4, 6, 8)))
def resumed_run_is_bit_exact(subject: Subject, stops: tuple[int, ...], **how: Any) -> None:
    """Resume, with dropout, in mid-epoch, at its end, before and after its last, partial batch."""
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
        losses = [[line["loss"] for line in reported["logged"]] for reported in (resumed, straight)]
        require_close("loss after resuming", losses[0], losses[1][-len(losses[0]) :], 1e-5)


COUNTING = "drivetrain.conformance.optimizers.Counting"


@check()
def an_optimizer_that_counts_resumes_exactly(subject: Subject) -> Refused | None:
    """Require that an optimizer's counts in groups, its lists and its None are saved, and that any
    driver restores them unchanged.
    """
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


OTHER_DTYPES = "drivetrain.conformance.optimizers.OtherDtypes"


@check()
def state_of_an_optimizer_keeps_its_dtypes(subject: Subject) -> Refused | None:
    """Require that state in another dtype than the weights is restored in its own, by any driver.
    torch's `load_state_dict` casts it to the dtype of the weights.
    """
    if refused := refuses_optimizer(subject, "OtherDtypes"):
        return refused
    problem = problem_for(subject, "dropout")
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"problem": problem, "settings": {"optimizer.name": OTHER_DTYPES}}
        straight = recorded(subject, **how)
        source = straight["checkpoint"].replace(f"{STEPS:06}", "000004")
        resumed = record(subject, f"{folder}/resumed", resume=source, **how)
        stored = read_all(CheckpointReader(source))["optimizer"]
        ends = {name.rpartition("/")[2] for name in stored}
        require("half:bfloat16" in ends, f"no 'half:bfloat16' is stored, but {sorted(ends)}")
        for other in (subject, *subject.peers[:1]):
            ranks = other.run(restore, problem=problem, source=source, optimizer="OtherDtypes")
            state = assemble([rank["state"] for rank in ranks])["optimizer"]
            require_same_bits(f"optimizer, restored by {other}", state, stored)
    if subject.can("exact_resume"):
        exact = compare(resumed, straight, last=STEPS - 4)
        require(exact is None, f"resumed at 4: {exact}")
    return None


@check()
def resumed_run_of_three_ranks_is_bit_exact(subject: Subject) -> None:
    """Resume on three ranks, since only a sum of three or more numbers depends on their order. Each
    rank fills buffers from its own samples, an evaluation reads them, and the global batch still
    grows.
    """
    wide = subject.at(3) if subject.can("multi_process") else subject
    growing = {"data.batch_warmup": 5, "data.batch_warmup_from": 4}
    resumed_run_is_bit_exact(wide, (3,), problem="normalised", evaluate=[11], settings=growing)


@check()
def a_parameter_of_no_dimension_moves_between_drivers(subject: Subject) -> None:
    """Require that a 0-d parameter and its moments are saved once, and that any driver restores
    them unchanged.
    """
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
    """Require that samples which workers had fetched ahead of the checkpoint are fetched again."""
    resumed_run_is_bit_exact(subject, (4,), workers=2)


@check()
def a_run_that_saves_behind_training_is_bit_exact(subject: Subject) -> None:
    """Require that a background save holds the state of its step, though later steps change the
    state while it is written.
    """
    with tempfile.TemporaryDirectory() as folder:
        straight = recorded(subject)["checkpoint"]
        background = record(subject, f"{folder}/background", background=True)["checkpoint"]
        for step in range(1, STEPS + 1):
            stored, expected = (
                read_all(CheckpointReader(last.replace(f"{STEPS:06}", f"{step:06}")))
                for last in (background, straight)
            )
            for kind in KINDS:
                require_same_bits(f"{kind} of step {step}", stored[kind], expected[kind])


@check(direction=("to", "from"))
def checkpoints_move_between_drivers_and_worlds(subject: Subject, direction: str) -> None:
    """Require bit-equal weights and moments, the same samples, and next losses that agree."""
    problem = problem_for(subject, "language")
    for peer in subject.peers:
        writer, reader = (subject, peer) if direction == "to" else (peer, subject)
        with tempfile.TemporaryDirectory() as folder:
            straight = recorded_language(writer, problem)
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
        losses = [[line["loss"] for line in reported["logged"]] for reported in (resumed, straight)]
        require_close(f"next loss, {what}", losses[0][:1], losses[1][4:5], 1e-6)
        require_close(f"losses, {what}", losses[0], losses[1][4:], 1e-5)


@check()
def a_checkpoint_is_what_plain_torch_reads(subject: Subject) -> None:
    """Evaluate the stored weights in plain PyTorch, and compare with the metrics of the run."""
    problem = problem_for(subject, "language")
    reported = recorded_language(subject, problem)
    weights = read_all(CheckpointReader(reported["checkpoint"]))["weights"]
    expected = oracle.evaluate(problem, weights, 11)["loss"]
    require_close("loss", [reported["evaluated"][-1]["metrics"]["loss"]], [expected], 1e-6)


@check()
def tied_weights_stay_tied(subject: Subject) -> None:
    """Require that tied weights are stored once, and are one parameter after an update of the
    restored model.
    """
    problem = problem_for(subject, "language")
    source = recorded_language(subject, problem)["checkpoint"]
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
    """Compare `full_params` on every rank with the shards of all ranks together."""
    problem = problem_for(subject, "language")
    source = recorded_language(subject, problem)["checkpoint"]
    ranks = subject.run(restore, problem=problem, source=source, updates=True)
    weights = assemble([rank["state"] for rank in ranks])["weights"]
    size = sum(p.numel() for p in PROBLEMS[problem].model().parameters())
    for number, rank in enumerate(ranks):
        require_same("num_parameters, of the whole model", rank["num_parameters"], size)
        whole = {name: rank["whole"][name] for name in weights}
        require_same_bits(f"full_params on rank {number}", whole, weights)


@check()
def another_model_is_refused_before_anything_changes(subject: Subject) -> None:
    """Require `CheckpointMismatch`, and weights and optimizer as they were."""
    source = recorded_language(subject, problem_for(subject, "language"))["checkpoint"]
    other = problem_for(subject, "regression")
    for rank in subject.run(refuse, problem=other, source=source, optimizer="AdamW"):
        require_refused("another model", rank["as it is"], "CheckpointMismatch", "")


@check(optimizer=("SGD", "Adagrad"))
def another_optimizer_is_refused_before_anything_changes(subject: Subject, optimizer: str) -> None:
    """Require `CheckpointMismatch` for AdamW's state, and weights and optimizer as they were. SGD
    would ignore that state, and Adagrad would fail on it.
    """
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
"""Kind of damage to an entry of the optimizer's state -> the error that names the entry."""


@check()
def a_damaged_optimizer_state_is_refused_before_anything_changes(subject: Subject) -> None:
    """Require that the error names the entry, and weights and optimizer are as they were."""
    problem = problem_for(subject, "regression")
    source = recorded(subject, problem=problem)["checkpoint"]
    ranks = subject.run(
        refuse, problem=problem, source=source, optimizer="AdamW", damage=list(DAMAGE)
    )
    for rank in ranks:
        for damage, error in DAMAGE.items():
            require_refused(f"an entry that is {damage}", rank[damage], error, "4.weight")


def require_refused(what: str, reported: Mapping[str, Any], error: str, named: str) -> None:
    require_same(f"error for {what}", reported["error"], error)
    require(named in reported["message"], f"the error for {what} does not name {named}: {reported}")
    require(
        reported["unchanged"],
        f"restore refused {what}, and had changed weights or optimizer by then",
    )


@check(optimizer=("AdamW", "Adagrad"))
def weights_alone_can_be_restored(subject: Subject, optimizer: str) -> None:
    """Require that the weights of a checkpoint without optimizer tensors are restored. The
    optimizer, which has stepped, returns to its initial state.
    """
    problem = problem_for(subject, "language")
    source = recorded_language(subject, problem)["checkpoint"]
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
