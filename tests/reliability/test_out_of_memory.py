"""One of several ranks runs out of memory while the others wait for it: the next start
continues.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint import newest
from drivetrain.trainer.fit import fit

from .runs import SETTINGS, everything, loss, recipe, start

ROOM = 2
"""Rows that rank 1 has memory for, from its fifth forward on. The run begins with microbatches of
four.
"""
STEPS = 9
forwards = itertools.count(1)


def short_of_memory(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    late = module.training and next(forwards) >= 5
    if os.environ.get("RANK") == "1" and late and len(batch[0]) > ROOM:
        raise torch.OutOfMemoryError(f"room for {ROOM} rows")
    return loss(module, batch)


def train(backend: str, out: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    words = os.open(out / environment["RANK"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(words, 2)
    settings = dataclasses.replace(SETTINGS, steps=STEPS, micro_batch=None)
    chosen = short_of_memory if (out / "short").exists() else loss
    what = dataclasses.replace(recipe(), loss=chosen, model=plain)
    fit(what, settings, backend=backend, out=out / "run", resume="auto")


def plain() -> nn.Module:
    """Return a model without dropout, which would draw other numbers for other microbatches."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def run(folder: Path) -> tuple[list[int | None], str]:
    """Return the exit codes, and the output of rank 1."""
    ranks = start("ddp", folder, 2, train)
    for process in ranks:
        process.join(100)
    return [process.exitcode for process in ranks], (folder / "1").read_text()


def weights(folder: Path) -> dict[str, Tensor]:
    last = newest(folder / "run" / "checkpoints")
    assert last is not None
    assert last.name == f"checkpoint-{STEPS:06d}"
    found: dict[str, Any] = everything(Path(str(last)))
    return {name: tensor for name, tensor in found.items() if name.startswith("weights/")}


def test_the_next_start_goes_on_with_smaller_microbatches(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (short := tmp_path / "short").mkdir()
    (short / "short").touch()
    assert run(whole)[0] == [0, 0]
    codes, words = run(short)
    assert 0 not in codes
    assert "out of memory in step 5 on rank 1 with micro_batch=4" in words
    assert "start again with --resume auto, which continues with micro_batch=2" in words
    assert json.loads((short / "run" / "memory.json").read_text()) == {"micro_batch": 2}
    assert run(short)[0] == [0, 0]
    expected = weights(whole)
    for name, tensor in weights(short).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
