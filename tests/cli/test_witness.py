"""`drivetrain witness`: what lies between two checkpoints is trained again, and a wrong number in a
weight, a moment, a gradient or a batch is named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from command_line import Drive

FLIPS = """
    import os
    import torch
    from torch import nn
    from drivetrain import Parallel, Recipe

    # KIND:STEP:RANK:BITS, BITS of one element, or 0 for the lowest bits of a stripe
    PLANTED = [spec.split(":") for spec in os.environ.get("FLIPS", "").split()]
    ROWS = torch.randn(80, 8, generator=torch.Generator().manual_seed(1))


    def flip(tensor, bits):
        local = getattr(tensor, "to_local", lambda: tensor)()
        words = local.detach().view(-1).view(torch.int32)[: 1 if bits else 16]
        words ^= bits or 1


    def planted(kind, step):
        mine = ("all", os.environ.get("RANK", "0"))
        found = [each for each in PLANTED if each[:2] == [kind, str(step)] and each[2] in mine]
        return [int(bits) for *_, bits in found]


    class Flips(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            # drivers may call it for some of the tensors at a time, or for a flat one of all
            chosen = [
                each for each in self.param_groups[0]["params"]
                if tuple(each.shape) == (12, 8) or (each.dim() == 1 and each.numel() > 40)
            ]
            numbers = [int(self.state[each].get("step", 0)) + 1 for each in chosen]
            for each, number in zip(chosen, numbers):
                for bits in planted("gradient", number):
                    flip(each.grad, bits)
            super().step(closure)
            for each, number in zip(chosen, numbers):
                for bits in planted("moment", number):
                    flip(self.state[each]["exp_avg"], bits)
                for bits in planted("weight", number):
                    flip(each, bits)


    class Rows:
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            row = ROWS[index].clone()
            for bits in planted("sample", index):
                flip(row, bits)
            return row


    recipe = Recipe(
        model=lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)),
        loss=lambda module, batch: (module(batch) - batch).square().sum(),
        train_data=Rows(),
        optimizer=lambda named: Flips([each for _, each in named], lr=0.01),
        parallel=Parallel(tensor={"0": "column", "2": "row"}),
    )
"""
TRAIN = (
    "--steps=8",
    "--set=global_batch=8",
    "--set=log_every=1",
    "--set=checkpoint.every=2",
    "--set=checkpoint.keep_last=9",
    "--set=data.shuffle=false",
)
PARTS = "--set=backend.optimizer_step=parts"
DRIVERS = {
    "ddp": ("--backend=ddp", "--nproc=2", "--set=backend.device=cpu"),
    "fsdp": ("--backend=fsdp", "--nproc=2", PARTS),
    "zero-3": ("--backend=deepspeed", "--nproc=2", "--set=backend.stage=3"),
    "tensor": ("--backend=mesh", "--nproc=2", "--set=backend.tensor=2", PARTS),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "flips.py"
    path.write_text(textwrap.dedent(FLIPS))
    return path


def judged(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the verdicts. Each verdict takes a launch of the ranks."""
    command = [sys.executable, "-m", "drivetrain.cli", "witness", "run", "--json", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_flipped_bit_is_named_and_the_steps_around_it_are_equal(
    drive: Drive, recipe: Path
) -> None:
    """The lowest bit of a weight, after step 3."""
    words = ("--backend=cpu", *TRAIN, "--steps=6", "--out=run")
    ran = drive("train", recipe, *words, FLIPS="weight:3:0:1")
    assert ran.code == 0, ran.stderr
    code, verdicts = judged(recipe.parent)
    assert code == 1
    assert [each["outcome"] for each in verdicts] == ["equal", "different", "equal"]
    assert all(each["checkpoint_compared"] for each in verdicts)
    first = verdicts[1]["first"]
    assert (first["step"], first["quantity"]) == (3, "weight 0.weight"), first


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_planted_corruptions_are_named_with_step_tensor_and_rank(
    drive: Drive, recipe: Path, driver: str
) -> None:
    """Require the tensor's rank where each rank holds a part: on ddp all ranks have the fault, or
    the run itself would end by copies that differ."""
    rank = "all" if driver == "ddp" else "1"
    several = 1 << 21 | 1 << 3
    planted = f"weight:1:{rank}:1 gradient:3:{rank}:{several} moment:6:{rank}:0 sample:59:all:1"
    ran = drive("train", recipe, *DRIVERS[driver], *TRAIN, "--out=run", FLIPS=planted)
    assert ran.code == 0, ran.stderr
    code, verdicts = judged(recipe.parent)
    assert code == 1
    assert [each["outcome"] for each in verdicts] == ["different"] * 4
    named = [(each["first"]["step"], each["first"]["quantity"]) for each in verdicts]
    moment = (6, "optimizer 0.weight/exp_avg")
    assert named == [(1, "weight 0.weight"), (3, "weight 0.weight"), moment, (8, "samples")]
    if driver != "ddp":
        assert [each["first"]["where"] for each in verdicts[:3]] == ["saved by rank 1"] * 3
    assert verdicts[3]["first"]["where"].startswith("3")


@pytest.mark.slow
def test_a_run_is_followed_on_another_driver(drive: Drive, recipe: Path) -> None:
    words = (*DRIVERS["fsdp"], *TRAIN, "--out=run")
    assert drive("train", recipe, *words, FLIPS=f"weight:3:1:{1 << 29}").code == 0
    code, verdicts = judged(
        recipe.parent, "--follow", "--seconds=0.1", "--backend=cpu", "--every=2"
    )
    assert code == 1 and [each["last"] for each in verdicts] == [4, 8]
    assert not any(each["exact"] or each["checkpoint_compared"] for each in verdicts)
    assert [each["outcome"] for each in verdicts] == ["different", "equal"]
    assert verdicts[0]["first"]["step"] == 4, "the first whose loss is computed with that weight"


def test_a_run_that_cannot_be_judged_is_refused(drive: Drive, recipe: Path) -> None:
    words = ("--backend=cpu", *TRAIN, "--steps=2", "--out=run", "--set=digests=none")
    assert drive("train", recipe, *words).code == 0
    ran = drive("witness", "run")
    assert ran.code == 2 and "digests=weights" in ran.stderr
