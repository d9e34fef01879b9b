"""Law 6, buffers. Each forward on any rank begins with the buffers of rank 0, also in evaluation.

These buffers are saved and shown, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .bench import Bench
from .cases import Refused, check
from .jobs import accumulate, microbatches, optimizer_called, partition
from .judge import require, require_same_bits
from .law_7_capabilities import world_of
from .problems import PROBLEMS, Normalised
from .refusal import problem_for, refuses
from .rehearsal import rehearse
from .state import assemble, pieces
from .subject import Subject


@check(micro_batch=(None, 2))
def each_forward_begins_with_those_of_rank_0(subject: Subject, micro_batch: int | None) -> None:
    """Require rank 0's buffers everywhere, though each rank has seen other samples. The buffers
    that rank 0's last training forward left are saved once, and shown on every rank.
    """
    problem = problem_for(subject, "normalised")
    ranks = subject.run(watch, problem=problem, micro_batch=micro_batch)
    first = ranks[0]
    for number, rank in enumerate(ranks):
        for turn, (seen, expected) in enumerate(zip(rank["seen"], first["seen"], strict=True)):
            what = f"buffers that forward {turn} begins with on rank {number}, beside rank 0"
            require_same_bits(what, seen, expected)
        require_same_bits(f"buffers in full_params on rank {number}", rank["shown"], first["left"])
    saved = assemble([rank["state"] for rank in ranks])["weights"]
    saved = {name: saved[name] for name in first["left"]}
    require_same_bits("buffers that are saved, beside those of rank 0", saved, first["left"])
    moved = [not torch.equal(first["left"][name], first["seen"][0][name]) for name in saved]
    require(all(moved), "training has left buffers as they were")


@check()
def one_process_normalises_as_plain_torch(subject: Subject) -> Refused | None:
    """Compare with plain PyTorch: means, variances and counts of the samples of each batch."""
    if refused := refuses_one_reader(subject):
        return refused
    rates = [0.005] * 9
    seen = rehearse(subject.at(1), "normalised", optimizer="SGD", steps=9, rates=rates)
    seen.require_losses(2e-6)
    seen.require_weights(2e-6)
    return None


@check()
def recomputed_layers_count_a_batch_once(subject: Subject) -> Refused | None:
    """Require one count a batch, though recomputed layers run twice."""
    if not subject.can("activation_checkpointing"):
        return None
    if refused := refuses_one_reader(subject):
        return refused
    seen = rehearse(
        subject.at(1),
        "normalised",
        optimizer="SGD",
        steps=3,
        rates=[0.005] * 3,
        activation_checkpointing=("BatchNorm1d",),
    )
    seen.require_weights(2e-6)
    return None


def refuses_one_reader(subject: Subject) -> Refused | None:
    """Return the refusal of a world of one rank, or None where there can be one reader. With
    several readers, each normalises its own samples.
    """
    if subject.at(1).run(world_of)[0]["readers"] == 1:
        return None
    return refuses(subject, "multiple_of_ranks", "1 rank", {}, world=1)


class Watched(Normalised):
    """A model that records its buffers before each forward, and after each forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []
        self.left: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(copied_buffers(self))
        y = super().forward(x)
        if self.training:
            self.left = copied_buffers(self)
        return y


def copied_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}


def watch(bench: Bench, *, problem: str, micro_batch: int | None) -> dict[str, Any]:
    """Job that does two updates, two batches of evaluation, and one more update."""
    made: list[Watched] = []

    def model() -> nn.Module:
        made.append(Watched())
        return made[-1]

    chosen = replace(PROBLEMS[problem], model=model)
    with bench.open() as session:
        engine = session.prepare(chosen.recipe(optimizer=optimizer_called("SGD")))
        reader, readers = session.world.reader_index, session.world.num_readers
        groups = [
            range(start, start + 4 * readers) for start in range(0, 20 * readers, 4 * readers)
        ]
        planned = [partition(group, reader, readers, micro_batch) for group in groups]
        batches = session.feed(microbatches(chosen, planned))
        for turn, parts in enumerate(planned):
            training = turn in (0, 1, 4)
            engine.module.train(training)
            if not training:
                with torch.no_grad(), engine.autocast():
                    for _ in parts:
                        engine.module(next(batches)["x"])
                continue
            accumulate(session, engine, chosen, batches, parts)
            for group in engine.param_groups:
                group["lr"] = 0.005
            engine.update()
        with engine.full_params() as module:
            shown = copied_buffers(module)
        own = made[-1]
        return {"seen": own.seen, "left": own.left, "shown": shown, "state": pieces(engine)}
