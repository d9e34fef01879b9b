"""On several ranks the first tensor that is not finite is named with its rank, and no bit of the
run changes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import CheckpointReader
from drivetrain.run.record_file import read_records

BAD = 19
"""The bad sample: with two feeders of 4 samples in microbatches of 2, sample 1 of microbatch 1 of
rank 0 in step 3.
"""
SCRIPT = """
import sys, torch
from torch import nn
from drivetrain import Parallel, Recipe, Settings, fit

out, backend, options, plant, finds, bad_sample = sys.argv[1:]
torch.set_num_threads(1)


class Act(nn.Module):
    def forward(self, inputs, bad):
        if plant == "forward":
            return torch.log(2 + torch.tanh(inputs) - 9 * bad)
        return torch.sqrt((inputs * (1 - bad)).square())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), Act(), nn.Linear(16, 8)

    def forward(self, inputs, bad):
        return inputs + self.down(self.act(self.up(inputs), bad))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(4, 8), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8) if backend != "mesh" else nn.LayerNorm(8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 1)

    def forward(self, inputs, bad):
        hidden = self.norm(self.first(inputs))
        if backend != "mesh":
            hidden = self.drop(hidden)
        for block in self.blocks:
            hidden = block(hidden, bad)
        return self.last(hidden)


data = []
for index, row in enumerate(torch.randn(40, 4, generator=torch.Generator().manual_seed(0))):
    data.append({"x": row, "bad": torch.tensor([float(index == int(bad_sample))])})

recipe = Recipe(
    Model,
    lambda module, batch: module(batch["x"], batch["bad"]).square().sum(),
    data,
    parallel=Parallel(tensor={"blocks.*.up": "column", "blocks.*.down": "row"}),
)
settings = Settings(steps=4, global_batch=8, micro_batch=2, log_every=10)
settings = settings.__class__(
    **{**vars(settings), "find_nonfinite": finds == "True",
       "data": settings.data.__class__(shuffle=False)}
)
options = dict(pair.split("=") for pair in options.split())
options = {key: int(value) if value.isdigit() else value for key, value in options.items()}
fit(recipe, settings, backend=backend, backend_options=options, nproc=2, out=out, progress=False)
"""


def train(out: Path, backend: str, options: str, plant: str, finds: bool = True) -> list[Any]:
    words = [str(out), backend, options, plant, str(finds), str(BAD)]
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_records(out / "metrics.jsonl")


def tensors(out: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(out / "checkpoints" / "checkpoint-000004")
    return {
        f"{kind}/{name}": reader.read(kind, name)
        for kind in ("weights", "optimizer", "state")
        for name in reader.names(kind)
    }


DRIVERS = {
    "ddp": "",
    "fsdp": "",
    "mesh": "tensor=2",
    "deepspeed": "stage=3",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["forward", "backward"])
@pytest.mark.parametrize("backend", DRIVERS)
def test_the_rank_is_named_and_no_bit_changes(tmp_path: Path, backend: str, plant: str) -> None:
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    found = train(tmp_path / "found", backend, DRIVERS[backend], plant)
    (skipped,) = (record for record in found if record["event"] == "step_skipped")
    (first,) = (record for record in found if record["event"] == "non_finite_found")
    assert skipped["step"] == first["step"] == 3
    if (backend, plant) == ("deepspeed", "backward"):
        assert "which this driver cannot run again" in first["text"]
    else:
        assert (first["phase"], first["rank"]) == (plant, 0), first["text"]
        assert (first["microbatch"], first["sample"]) == (1, 1), first["text"]
        named = "blocks.0.act" if plant == "forward" else "blocks.1.act"
        assert first["module"] == named, first["text"]
        assert first["data"] == f"sample {BAD} of epoch 0 ({BAD})"
        if plant == "backward":
            assert first["tensor"].startswith("blocks.1.up."), first["text"]
    train(tmp_path / "other", backend, DRIVERS[backend], plant, finds=False)
    with_search, without = tensors(tmp_path / "found"), tensors(tmp_path / "other")
    assert with_search.keys() == without.keys()
    assert [k for k in without if not torch.equal(with_search[k], without[k])] == []
