"""Statistics in the records and on the page of a run."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Recipe, Settings, StatsSettings, fit
from drivetrain.run.record_schema import fits
from drivetrain.run.run_history import RunHistory

STARTED = {"event": "run_started", "first_step": 0, "num_parameters": 7}


def stats(step: int, **norms: float | None) -> dict[str, Any]:
    figures = {
        name.replace("_", "."): {
            "grad_norm": norm, "grad_nonfinite": 0.0, "weight_norm": 2.0, "update_norm": 0.5
        }
        for name, norm in norms.items()
    }  # fmt: skip
    return {"event": "stats", "step": step, "parameters": figures, "activations": {}}


def test_rows_are_parameters_or_layers() -> None:
    few, _ = RunHistory.of([stats(5, a_weight=3.0, a_bias=4.0)]).layer_maps()
    assert (few.layers, few.steps, few.values) == (["a.weight", "a.bias"], [5], [[3.0], [4.0]])
    names = [f"{layer}_{part}" for layer in range(40) for part in ("weight", "bias")]
    many, ratio = RunHistory.of([stats(5, **dict.fromkeys(names, 3.0))]).layer_maps()
    assert many.layers == ratio.layers == [str(layer) for layer in range(40)]
    assert many.values[0] == [pytest.approx(math.sqrt(18))]
    assert ratio.values[0] == [pytest.approx(0.25)]


def test_values_that_are_unknown_or_not_finite_differ() -> None:
    frozen = stats(1, a=None)
    frozen["parameters"]["a"]["grad_nonfinite"] = None
    gradients, _ = RunHistory.of([frozen, stats(2, a=None)]).layer_maps()
    assert gradients.values == [[None, math.inf]]


def test_a_long_run_keeps_some_columns_and_the_newest() -> None:
    history = RunHistory.of([STARTED, *(stats(step, a=1.0) for step in range(1, 1001))])
    steps = history.layer_maps()[0].steps
    assert 25 <= len(steps) <= 60 and steps[0] < 50 and steps[-1] > 970
    assert len({b - a for a, b in pairwise(steps)}) == 1
    history.add([{**STARTED, "first_step": 500}])
    assert history.layer_maps()[0].steps[-1] <= 500


def test_a_run_records_statistics_and_draws_them(tmp_path: Path) -> None:
    recipe = Recipe(
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)),
        loss=lambda module, batch: module(batch).square().sum(),
        train_data=torch.randn(16, 4),
    )
    settings = Settings(
        steps=4, global_batch=4, log_every=2, stats=StatsSettings(every=1, activations=("0",))
    )
    fit(recipe, settings, backend="cpu", out=tmp_path / "run", progress=False)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["event"] == "stats"]
    assert [record["step"] for record in found] == [2, 4] and all(map(fits, found))
    assert found[0]["parameters"]["0.weight"]["grad_norm"] > 0
    assert found[0]["activations"]["0"]["std"] > 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'aria-label="Gradient norm (before clipping) by layer and step"' in page
    assert 'aria-label="Update norm divided by weight norm by layer and step"' in page
    assert "<title>0.weight</title>" in page
