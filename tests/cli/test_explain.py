"""explain: the origin of values, the refusals, and estimates that hold against measured peaks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from drivetrain import OptimizerSettings, Recipe, Settings
from drivetrain.cli.app import app
from drivetrain.cli.settings.explain import activation_bytes, explain, show_explanation, state_bytes
from drivetrain.kernel.errors import RecipeError, UnknownBackend
from drivetrain.registry import find_driver

RECIPE = """
import torch
from torch import nn
from drivetrain import Recipe, Settings

inputs = torch.randn(64, 1024)
settings = Settings(steps=3, global_batch=16, micro_batch=8)


def model():
    return nn.Sequential(nn.Linear(1024, 12288), nn.GELU(), nn.Linear(12288, 1024))


def loss(module, batch):
    return module(batch[0]).square().sum()


recipe = Recipe(model=model, loss=loss, train_data=torch.utils.data.TensorDataset(inputs))
"""

MEASURE = """
import resource, sys, torch
from pathlib import Path
from drivetrain.cli.settings.recipe_file import load_recipe_file
from drivetrain.trainer.fit import fit
import torch._dynamo  # the first optimizer imports it: not the model's
file = load_recipe_file(Path(sys.argv[1]))
recipe = file.build(None)
warm = torch.zeros(8, 8) @ torch.zeros(8, 8)
now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
fit(recipe, file.settings, backend="cpu")
# not ru_maxrss, which begins with the peak of the process that started this one
status = Path("/proc/self/status").read_text()
peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
print(int(peak) * 1024 - now)
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "wide.py"
    path.write_text(RECIPE)
    return path


@pytest.mark.slow
def test_the_estimate_holds_against_the_measured_peak(recipe_path: Path) -> None:
    (record,) = explain(recipe_path, ["cpu"], [], 1)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(recipe_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = int(run.stdout)
    assert record["total_bytes"] == pytest.approx(measured, rel=0.15)


def test_each_value_has_its_source(recipe_path: Path) -> None:
    given = ("command line", {"seed": "3", "backend.bucket_cap_mb": "7"})
    (record,) = explain(recipe_path, ["ddp"], [("a.toml", {"seed": 2, "log_every": 1}), given], 2)
    sources = {key: entry["source"] for key, entry in record["settings"].items()}
    assert sources["steps"] == "recipe"
    assert sources["seed"] == "command line"
    assert sources["precision"] == "default"
    assert sources["log_every"] == "a.toml"
    assert sources["backend.bucket_cap_mb"] == "command line"


def test_the_sizes_of_a_batch_that_grows(recipe_path: Path) -> None:
    given = ("command line", {"data.batch_warmup": "10", "data.batch_warmup_from": "4"})
    records = explain(recipe_path, ["cpu"], [given], 1)
    found = [(stage["step"], stage["size"]) for stage in records[0]["batches"]]
    assert found == [(1, 4), (5, 8), (8, 12), (11, 16)]
    console = Console(file=io.StringIO(), width=120)
    show_explanation(records, console)
    expected = (
        "Global batch: 4 from step 1, 8 from step 5, 12 from step 8, 16 from step 11; the last"
    )
    assert expected in console.file.getvalue()  # type: ignore[attr-defined]


def test_sharding_divides_what_it_says_it_divides(recipe_path: Path) -> None:
    def layout(backend: str, ranks: int) -> dict[str, Any]:
        (record,) = explain(recipe_path, [backend], [], ranks)
        return dict(record["layout"])

    whole, parts = layout("ddp", 4), layout("fsdp", 4)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert parts[name] == pytest.approx(whole[name] / 4, rel=0.01)


def test_memory_is_that_of_the_driver_s_own_step(recipe_path: Path) -> None:
    (whole,), (parts,) = (explain(recipe_path, [name], [], 4) for name in ("ddp", "fsdp"))
    assert whole["total_bytes"] == sum(whole["step"].values())
    assert whole["step"]["gradients"] == whole["step"]["weights"]
    assert parts["step"]["weights"] == pytest.approx(whole["step"]["weights"] / 4, rel=0.01)
    assert parts["step"]["communication"] > whole["step"]["weights"]  # gathered, in one unit


def test_a_larger_microbatch_needs_more(recipe_path: Path) -> None:
    def total(size: int) -> int:
        (record,) = explain(recipe_path, ["cpu"], [("", {"micro_batch": str(size)})], 1)
        return int(record["total_bytes"])

    assert total(1) < total(4) < total(8)


def test_a_step_that_needs_numbers_is_estimated_by_formulas(tmp_path: Path) -> None:
    path = tmp_path / "reads.py"
    path.write_text(
        RECIPE.replace("12288", "8").replace(
            "    return module", "    batch[0].numpy()\n    return module"
        )
    )
    records = explain(path, ["cpu"], [], 1)
    layout = records[0]["layout"]
    assert records[0]["step"] is None and "numpy" in records[0]["not_symbolic"]
    assert records[0]["total_bytes"] == sum(
        layout[f"{part}_bytes"]
        for part in ("parameter", "gradient", "optimizer", "transient", "activation")
    )
    console = Console(file=io.StringIO(), width=80)
    show_explanation(records, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "estimated by formulas" in shown and "numpy" in shown


def test_a_rank_whose_memory_is_too_small_is_shown(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = replace(find_driver("cpu").probe(), memory_bytes=100_000_000)
    monkeypatch.setattr(type(find_driver("cpu")), "probe", lambda _: probe)
    (record,) = explain(recipe_path, ["cpu"], [], 1)
    assert record["fits"] is False
    console = Console(file=io.StringIO(), width=80)
    show_explanation([record], console)
    assert "NO" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_has_the_memory_of_one_accelerator(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    cards = {"devices": ("card 0", "card 1"), "memory_bytes": 160 * 10**9}
    driver = find_driver("ddp")
    probe = replace(driver.probe(), **cards)
    monkeypatch.setattr(type(driver), "probe", lambda _: probe)
    (record,) = explain(recipe_path, ["ddp"], [], num_ranks)
    assert record["memory_bytes"] == 80 * 10**9


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (OptimizerSettings(), 2),
        (OptimizerSettings(name="torch.optim.SGD"), 0),
        (OptimizerSettings(name="torch.optim.SGD", args={"momentum": 0.9}), 1),
    ],
)
def test_optimizer_state_is_measured(optimizer: OptimizerSettings, states: int) -> None:
    module = nn.Linear(100, 100, bias=False)
    found = state_bytes(Recipe(model=nn.Module, loss=lambda m, b: b), optimizer, module)
    assert found["weight"] == pytest.approx(states * module.weight.nbytes, abs=8)


def test_activations_are_counted_once_and_without_weights() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        hidden = module(batch)
        return (hidden.exp() * hidden).sum()  # both keep `hidden`, or its exponential

    data = list(torch.zeros(4, 100))
    what = Recipe(model=nn.Module, loss=loss, train_data=data)
    found = activation_bytes(what, Settings(global_batch=4), nn.Linear(100, 100), 1)
    # the batch (kept for the weight's gradient), `hidden` and its exponential
    assert found == 3 * 4 * 100 * 4


def test_an_unknown_backend_is_refused(recipe_path: Path) -> None:
    with pytest.raises(UnknownBackend):
        explain(recipe_path, ["cpux"], [], 1)


def test_all_drivers_are_printed_as_json_and_one_that_refuses_says_so(recipe_path: Path) -> None:
    command = ["explain", str(recipe_path), "--all", "--nproc", "2", "--json"]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 0, run.output
    records = {record["backend"]: record for record in json.loads(run.stdout)}
    assert {"cpu", "ddp", "fsdp"} <= set(records)
    assert "more than one process" in records["cpu"]["refused"]
    assert records["ddp"]["fits"] is True


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (".square().sum()", ".square().mean()", "recipe.loss returns a mean"),
        (
            "TensorDataset(inputs))",
            "TensorDataset(inputs), eval_data={'a': [inputs[0]]}, measure=lambda *_: {'a': _[9]})",
            "recipe.measure of eval_data['a']",
        ),
    ],
)
def test_the_check_that_a_run_begins_with_is_made(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(RECIPE.replace("12288", "8").replace(old, new))
    with pytest.raises(RecipeError) as raised:
        explain(path, ["cpu"], [], 1)
    assert words in str(raised.value)
    assert explain(path, ["cpu"], [("", {"evaluate.sanity_check": "false"})], 1)
