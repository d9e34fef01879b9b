"""`drivetrain plan`: the ways to place a run, ranked, and commands that run."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import Drive
from rich.console import Console
from typer.testing import CliRunner

from drivetrain import Settings
from drivetrain.cli.app import app
from drivetrain.cli.settings.plan import plan, show_plan, size_in_bytes
from drivetrain.cli.settings.recipe_file import load_recipe_file
from drivetrain.cli.settings.resolve_settings import Layer, parse_pairs, resolve
from drivetrain.kernel.errors import SettingError
from drivetrain.registry import find_driver

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Recipe, Settings

settings = Settings(steps=2, global_batch=16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


recipe = Recipe(
    model=lambda: nn.Sequential(Block(), Block()),
    loss=lambda module, batch: module(batch[0]).square().mean(1).sum(),
    train_data=TensorDataset(torch.zeros(64, 32)),
)
"""
FP32 = [("here", {"precision": "fp32"})]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def all_ways(recipe: Path) -> dict[str, Any]:
    """Return the ways of all drivers on two ranks of as much memory as ddp needs."""
    (ddp,) = plan(recipe, "ddp", FP32, 2, "h100")["fits"]
    return plan(recipe, None, FP32, 2, "h100", f"{ddp['total_bytes'] / 0.9 + 1:.0f}")


def test_the_quickest_way_that_fits_is_the_first(all_ways: dict[str, Any]) -> None:
    seconds = [each["seconds"] for each in all_ways["fits"]]
    assert seconds == sorted(seconds)
    assert all(each["total_bytes"] <= all_ways["usable_bytes"] for each in all_ways["fits"])
    assert {each["backend"] for each in all_ways["fits"]} >= {"ddp", "fsdp"}
    parts = ("compute_seconds", "memory_seconds", "network_seconds")
    for each in all_ways["fits"]:
        assert sum(each[part] for part in parts) == pytest.approx(each["seconds"])
        assert sum(each["bytes"].values()) == each["total_bytes"]
        assert set(each["sent_bytes"]) == {"machine", "network"}


def test_the_others_have_reasons(all_ways: dict[str, Any]) -> None:
    too_large = [each for each in all_ways["left_out"] if each["needed_bytes"]]
    assert too_large
    assert all(each["needed_bytes"] > all_ways["usable_bytes"] for each in too_large)
    assert all(each["reason"] for each in all_ways["left_out"])
    assert any("pipeline" in each["reason"] for each in all_ways["left_out"])


@pytest.mark.parametrize("width", [80, 200])
def test_it_is_shown(all_ways: dict[str, Any], width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_plan(all_ways, 2, console)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = shown.splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert lines[-1] == all_ways["fits"][0]["command"]
    assert f"{len(all_ways['fits']) - 2} more fit: --top shows them" in lines
    assert "not fit; the smallest, " in " ".join(lines)


def test_the_command_of_a_way_runs(
    all_ways: dict[str, Any], drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    command = shlex.split(all_ways["fits"][0]["command"])
    assert command[:3] == ["drivetrain", "train", str(recipe)]
    ran = drive(*command[1:], "--out", "run", COLUMNS="80")
    assert ran.code == 0, ran.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["backend"] == all_ways["fits"][0]["backend"]


@pytest.mark.slow
def test_a_run_shows_the_ways_that_auto_chooses_from(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    words = ("--nproc", 2, "--plan", "--set", "micro_batch=1", "--json", "--out", "run")
    ran = drive("train", recipe, *words)
    assert ran.code == 0, ran.stderr
    first = next(line for line in ran.stderr.splitlines() if line.startswith(("ddp ", "fsdp ")))
    backend = first.split()[0]
    assert f"auto takes {backend}" in ran.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["backend"] == backend
    assert all(json.loads(line) for line in ran.stdout.splitlines())


@pytest.mark.parametrize(("ranks", "in_machine"), [(16, 8), (12, 6)])
def test_several_machines_are_started_by_torchrun(
    recipe: Path, ranks: int, in_machine: int
) -> None:
    found = plan(recipe, "ddp", FP32, ranks, "h100")
    words = shlex.split(found["fits"][0]["command"])
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", str(in_machine)]
    assert found["fits"][0]["sent_bytes"]["network"] > 0


def test_what_is_given_is_not_varied(recipe: Path) -> None:
    values = {"precision": "bf16", "micro_batch": "2", "backend.stage": "2"}
    found = plan(recipe, "deepspeed", [("here", values)], 2, "a100")
    (way,) = found["fits"]
    assert (way["settings"]["precision"], way["settings"]["micro_batch"]) == ("bf16", 2)
    assert way["options"] == {"stage": 2}
    assert "--set micro_batch=2" in way["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "2", "--memory", "much"], "memory 'much' is no size"),
        (["--world", "2", "--device", "abacus"], "device 'abacus' is not known"),
        (["--world", "2", "--device", "h100", "--calibrate", "mine.json"], "--device names one"),
        (["--world", "2", "--calibrate", "mine.txt"], "must end with .json"),
        (["--world", "0"], "greater than or equal to 1"),
        (["--world", "2", "--backend", "fsp"], "fsdp"),
        (["--world", "2", "--set", "presicion=bf16"], "precision"),
        ([], "Missing option '--world'"),
    ],
)
def test_nonsense_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_driver_that_is_asked_for_and_lists_nothing_says_so(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(recipe), "--world", "1", "--backend", "cpu"])
    assert result.exit_code == 0
    assert "None fits." in result.output
    assert "cpu: does not list ways to place a model on accelerators" in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("141 GiB", 141 * 2**30), ("1.5tb", 1.5e12), ("512", 512), ("3kB", 3000)],
)
def test_sizes_have_units(text: str, size: float) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0GB", "1e9", "80 Gbit", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="is no size; give a number and a unit, such as 80GB"):
        size_in_bytes(text)


def settings_of(backend: str, path: Path, layers: list[Layer]) -> tuple[Settings, dict[str, Any]]:
    found = resolve(load_recipe_file(path), find_driver(backend), layers)
    return found.settings, dict(found.backend_options)


def test_the_command_has_what_was_given(recipe: Path) -> None:
    given = {
        "optimizer.lr": 0.5,
        "optimizer.args.betas": [0.9, 0.95],
        "optimizer.groups": [{"pattern": "*.bias", "weight_decay": 0.0}, {"lr": 0.25}],
        "evaluate.every": None,
        "stats.every": 7,
    }
    layers: list[Layer] = [
        ("my.toml", given),
        ("here", {"precision": "bf16", "global_batch": "32", "backend.stage": "2", "seed": "3"}),
    ]
    (way,) = plan(recipe, "deepspeed", layers, 2, "h100")["fits"]
    words = shlex.split(way["command"])
    pairs = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    expected = settings_of("deepspeed", recipe, layers)
    assert settings_of("deepspeed", recipe, [parse_pairs(pairs, {})]) == expected
    assert expected[0].global_batch == 32


def test_a_recipe_s_configuration_is_in_the_command(tmp_path: Path) -> None:
    path = tmp_path / "wide.py"
    text = RECIPE.replace("recipe = Recipe(", "def recipe(config: Config): return Recipe(")
    config = "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 3\n"
    path.write_text(text.replace("settings =", f"{config}settings ="))
    (way, *_) = plan(path, "ddp", [("here", {"recipe.width": "5"})], 2, "h100")["fits"]
    assert "--set recipe.width=5" in way["command"]


# --- hf:CONFIG.json -------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def invoke(command: str, model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [command, f"hf:{model}", *arguments])


def written(folder: Path, table: Any) -> Path:
    path = folder / "config.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


@pytest.mark.slow
def test_a_model_of_transformers_is_planned_and_trained_by_its_configuration(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, LLAMA)
    result = invoke(
        *("plan", path, "--world", "2", "--backend", "mesh", "--sequence", "32", "--json"),
        *("--set", "global_batch=4", "--set", "precision=fp32", "--set", "steps=2"),
    )
    assert result.exit_code == 0, result.output
    fits = json.loads(result.stdout)["fits"]
    ways = {
        name: each for each in fits for name in ("context", "tensor") if name in each["options"]
    }
    assert set(ways) == {"context", "tensor"}
    for name, each in ways.items():
        command = shlex.split(each["command"])
        assert command[:3] == ["drivetrain", "train", f"hf:{path}"]
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain.cli", *command[1:], "--out", str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["settings"]["recipe.sequence"]["value"] == 32


def test_a_configuration_is_planned_from_python(tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMA, "auto_map": {"AutoConfig": "elsewhere.Config"}})
    found = plan(Path(f"hf:{path}"), "ddp", [("here", {"micro_batch": 1})], 2, "h100")
    assert f"train hf:{path} --backend ddp" in found["fits"][0]["command"]
    assert "recipe.sequence" not in found["fits"][0]["command"]  # all positions


def test_a_model_that_fills_gaps_is_planned(tmp_path: Path) -> None:
    result = invoke("explain", written(tmp_path, BERT), "--set", "global_batch=2", "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert record["not_symbolic"] == ""


def test_a_file_of_settings_may_name_a_configuration_beside_it(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    (tmp_path / "run.toml").write_text('recipe = "hf:config.json"\n')
    result = CliRunner().invoke(
        app, ["explain", "--config", str(tmp_path / "run.toml"), "--set", "recipe.sequence=16"]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "is not a configuration in JSON"),
        ("[1]", "has no model_type"),
        ({**LLAMA, "model_type": "abacus"}, "transformers cannot read"),
        ({**LLAMA, "hidden_size": "wide"}, "transformers cannot read"),
        (
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
            "describes LlamaForSequenceClassification, which does not predict tokens",
        ),
        (LLAMA, "64 positions; give at most 64, or a copy of the file with more"),
    ],
)
def test_a_configuration_that_cannot_be_planned_says_why(
    tmp_path: Path, table: Any, message: str
) -> None:
    result = invoke("plan", written(tmp_path, table), "--world", "2", "--sequence", "65")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = invoke("plan", tmp_path / "none.json", "--world", "2")
    assert result.exit_code == 2
    assert "there is no file" in result.output
