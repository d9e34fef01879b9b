"""The account of memory on two ranks: whole weights, sharded ones, and pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.run.record_file import read_records

SCRIPT = """
import json, sys, torch
from torch import nn
from drivetrain import Parallel, Recipe, Settings, fit

torch.set_num_threads(1)


def layer():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def build():
    return nn.Sequential(layer(), layer())


def loss(module, batch):
    return module(batch).square().sum()


recipe = Recipe(
    build, loss, torch.randn(64, 8), parallel=Parallel(stages=["?"])
)
fit(
    recipe,
    Settings(steps=2, global_batch=16),
    backend=sys.argv[2],
    backend_options=json.loads(sys.argv[3]),
    nproc=2,
    out=sys.argv[1],
    progress=False,
)
"""
LAYER = 4 * (8 * 8 + 8)
"""Bytes of the weights of a layer."""


def account(folder: Path, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, str(folder), backend, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [e for e in read_records(folder / "metrics.jsonl") if e["event"] == "memory_counted"]
    assert len(found) == 1
    return dict(found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options", "layers"),
    [("ddp", {}, 2), ("fsdp", {"min_unit_params": 1}, 1), ("mesh", {"pipeline": 2}, 1)],
)
def test_each_rank_counts_what_it_holds(
    tmp_path: Path, backend: str, options: dict[str, Any], layers: int
) -> None:
    found = account(tmp_path / "run", backend, options)
    parts = found["parts"]
    placeholders = 2 * 4 if backend == "mesh" else 0  # for the weights of the other stage
    assert parts["weights"] == layers * LAYER + placeholders
    assert parts["gradients"] == layers * LAYER
    # two moments, and a count of steps for each of the parameters
    assert 2 * layers * LAYER < parts["optimizer"] <= 2 * layers * LAYER + 4 * 4
    assert found["estimated"] in ([], ["communication"])
    if backend != "mesh":
        rows = 8
        modules = {"0.0": rows * 8 * 4, "0.1": rows * 8 * 4, "1.1": rows * 8 * 4}
        assert found["modules"] == modules


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_deepspeed_holds_itself_is_estimated(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    found = account(tmp_path / "run", "deepspeed", {"stage": stage})
    parts, rows = found["parts"], 8
    assert parts["activations"] == (3 * rows * 8 + 1) * 4  # the loss is scaled
    copies = LAYER if stage < 3 else 0  # those of stage 3 are out of reach
    assert copies + 2 * LAYER < parts["optimizer"] <= copies + 2 * LAYER + 4 * 4
    assert parts.get("gradients") == {1: 2 * LAYER, 2: LAYER, 3: None}[stage]
    assert ("gradients" in found["estimated"]) == (stage == 2)
