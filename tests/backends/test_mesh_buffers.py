"""Buffers of stages, such as the statistics of batch normalization: the ranks of a stage share
them, or each rank has its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_decoder import VOCABULARY, WIDTH, assert_alike, loss, mesh, observed
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normalised = self.norm(x.transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.linear(normalised).tanh()
        return y


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def train(bench: Bench, *, steps: int = 6, **arguments: Any) -> dict[str, Any]:
    """A job: return the curve, evaluations, and the final weights and buffers."""
    parts = {"model": Normalised, "loss": loss}
    even = {"global_batch": 8, "micro_batch": 2}  # what is repeated would count in the statistics
    return observed(bench, parts, {"steps": steps, **even}, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("synced", [False, True])
def test_ranks_of_a_stage_normalise_as_ranks_of_fsdp(schedule: str, synced: bool) -> None:
    """Compare with fsdp, in evaluation, too: with the statistics of the first rank, and with each
    rank's own.
    """
    alone = Subject("fsdp", 2, {"sync_buffers": synced}).run(train)
    seen = mesh(4, pipeline=2, schedule=schedule, sync_buffers=synced).run(train)
    for rank in seen:
        assert_alike(rank, alone[0])


@pytest.mark.parametrize("then", ["as it was", pytest.param("by fsdp", marks=pytest.mark.slow)])
def test_each_rank_resumes_with_its_own_buffers(then: str, tmp_path: Path) -> None:
    """Resume with as many ranks as held a stage, in a pipeline and without one."""
    in_stages = mesh(4, pipeline=2, sync_buffers=False)
    in_stages.run(train, steps=3, out=str(tmp_path))
    subject = in_stages if then == "as it was" else Subject("fsdp", 2, {"sync_buffers": False})
    whole = in_stages.run(train)[0]
    for seen in subject.run(train, resume=str(tmp_path / "checkpoints" / "checkpoint-000003")):
        tight = {"rtol": 0.0, "atol": 0.0} if then == "as it was" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(seen["curve"], whole["curve"][3:], **tight)
        torch.testing.assert_close(seen["measured"], whole["measured"][1:], **tight)
        torch.testing.assert_close(seen["weights"], whole["weights"], **tight)
