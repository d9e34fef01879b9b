"""`--config`: the keys of `--set` in files, and the schema that editors check them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Drive
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from drivetrain.cli.settings.config_files import read_config_files
from drivetrain.cli.settings.schema import schema
from drivetrain.kernel.errors import SettingError

TOML = """
#:schema ./my.schema.json
steps = 2

[optimizer]
lr = 3e-4
args.betas = [0.8, 0.9]

[checkpoint]
keep_every = "none"

[recipe]
file = "recipes/small.py"
width = 8

[backend]
name = "cpu"
threads = 1
"""
VALUES = {
    "steps": 2,
    "optimizer": {"lr": 3e-4, "args": {"betas": [0.8, 0.9]}},
    "checkpoint": {"keep_every": "none"},
    "recipe": {"file": "recipes/small.py", "width": 8},
    "backend": {"name": "cpu", "threads": 1},
}


@pytest.fixture
def small(tmp_path: Path, recipe: Path) -> Path:
    """Make a recipe in a folder of its own."""
    (tmp_path / "recipes").mkdir()
    return recipe.rename(tmp_path / "recipes" / "small.py")


def test_three_formats_say_the_same(tmp_path: Path) -> None:
    for name, text in {
        "a.toml": TOML,
        "a.yaml": yaml.safe_dump(VALUES),
        "a.json": json.dumps(VALUES),
    }.items():
        (tmp_path / name).write_text(text)
        files = read_config_files([tmp_path / name])
        assert (files.recipe, files.backend) == (tmp_path / "recipes/small.py", "cpu"), name
        assert files.layers == [
            (
                str(tmp_path / name),
                {
                    "steps": 2,
                    "optimizer.lr": 3e-4,
                    "optimizer.args.betas": [0.8, 0.9],
                    "checkpoint.keep_every": "none",
                    "recipe.width": 8,
                    "backend.threads": 1,
                },
            )
        ], name


def config_of(run: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((run / "config.json").read_text())
    return config


def test_later_files_win_and_the_command_line_wins_over_all(
    tmp_path: Path, small: Path, drive: Drive
) -> None:
    (tmp_path / "base.toml").write_text(TOML)
    (tmp_path / "more.yaml").write_text("optimizer: {lr: 1e-2}\nseed: 7\nlog_every: 1\n")
    given = ("--config", "base.toml", "--config", "more.yaml", "--set", "seed=8")
    ran = drive("train", *given, "--out", "run")
    assert ran.code == 0, ran.stderr
    config = config_of(tmp_path / "run")
    shown = {
        key: (entry["value"], entry["source"])
        for key, entry in config["settings"].items()
        if entry["source"] not in ("default", "recipe")
    }
    assert shown == {
        "steps": (2, "base.toml"),
        "log_every": (1, "more.yaml"),
        "seed": (8, "command line"),
        "optimizer.lr": (1e-2, "more.yaml"),
        "optimizer.args": ({"betas": [0.8, 0.9]}, "base.toml"),
        "checkpoint.keep_every": (None, "base.toml"),
        "recipe.width": (8, "base.toml"),
        "backend.threads": (1, "base.toml"),
    }
    assert (config["recipe"], config["backend"]) == (str(small), "cpu")
    again = drive("train", "--config", "run/config.json", "--out", "again")
    assert again.code == 0, again.stderr
    repeated = config_of(tmp_path / "again")
    assert repeated["given"] == config["given"]
    values = [{k: v["value"] for k, v in c["settings"].items()} for c in (config, repeated)]
    assert values[0] == values[1]


def test_epochs_in_a_file_lift_steps_below_it_and_not_above(
    tmp_path: Path, small: Path, drive: Drive
) -> None:
    (tmp_path / "a.toml").write_text("epochs = 1\n")
    given = ("train", small, "--backend", "cpu", "--config", "a.toml")
    assert drive(*given, "--out", "lifted").code == 0
    assert config_of(tmp_path / "lifted")["settings"]["steps"]["value"] is None
    assert drive(*given, "--steps", "1", "--out", "set").code == 0
    assert config_of(tmp_path / "set")["settings"]["steps"]["value"] == 1


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("a.toml", "[optimizer]\nlrr = 1\n", ["a.toml", "optimizer.lrr", "optimizer.lr"]),
        ("a.toml", 'steps = "many"\n', ["a.toml", "steps", "many"]),
        ("a.toml", "[recipe]\nwidht = 1\n", ["a.toml", "recipe.widht", "recipe.width"]),
        ("a.toml", "[backend]\nthread = 1\n", ["a.toml", "backend.thread", "threads"]),
        ("a.toml", "steps = \n", ["a.toml", "cannot be read", "line 1"]),
        ("a.yaml", "steps: [1\n", ["a.yaml", "cannot be read"]),
        ("a.yaml", "!!python/object/apply:os.system [true]\n", ["a.yaml", "cannot be read"]),
        ("a.json", "[1]", ["a.json", "table"]),
        ("a.json", "[" * 100_000, ["a.json", "cannot be read"]),
        ("a.toml", "backend = 3\n", ["a.toml", "backend", "3"]),
        ("a.ini", "steps=1\n", ["a.ini", ".toml"]),
        ("a.toml", None, ["a.toml", "cannot be read"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file(
    tmp_path: Path, small: Path, drive: Drive, name: str, text: str | None, reported: list[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    ran = drive("train", small, "--backend", "cpu", "--config", name, "--out", "run")
    assert ran.code == 2
    assert all(word in " ".join(ran.stderr.split()) for word in reported), ran.stderr
    assert not (tmp_path / "run").exists()


def test_explain_takes_the_same_files(tmp_path: Path, small: Path, drive: Drive) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    ran = drive("explain", "--config", "a.toml", "--json")
    assert ran.code == 0, ran.stderr
    (record,) = json.loads(ran.stdout)
    assert record["backend"] == "cpu"
    assert record["settings"]["optimizer.lr"] == {"value": 3e-4, "source": "a.toml"}


def test_the_schema_takes_what_a_run_takes(small: Path) -> None:
    found = schema(small)
    Draft202012Validator.check_schema(found)
    validator = Draft202012Validator(found)
    validator.validate(VALUES)
    validator.validate({"recipe": "small.py", "backend": "fsdp"})
    for wrong in (
        {"stepps": 1},
        {"steps": "many"},
        {"optimizer": {"lrr": 1}},
        {"recipe": {"widht": 8}},
        {"backend": {"thread": 8}},
        {"data": {"workers": 0.5}},
        {"precision": "bf17"},
        {"schedule": {"name": "cos"}},
        {"schedule": {"warmup": -1}},
        {"schedule": {"decay": 0}},
        {"global_batch": 0},
        {"stall_seconds": 0},
        {"optimizer": {"layer_decay": 1.5}},
        {"optimizer": {"groups": [{"lr": -1}]}},
        {"backend": {"tensor": 0}},
        {"backend": {"stage": 4}},
    ):
        with pytest.raises(ValidationError):
            validator.validate(wrong)


def test_the_schema_describes_all_settings_and_options() -> None:
    found = schema()
    described = found["properties"]["global_batch"]
    assert described["default"] == 32
    assert "Samples in one update" in described["description"]
    options = found["properties"]["backend"]["anyOf"][1]["properties"]
    stage = options["stage"]["anyOf"][0]
    assert stage["description"].startswith("[deepspeed]")


def test_a_file_for_a_run_is_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"")
    with pytest.raises(SettingError, match="must end in"):
        read_config_files([tmp_path / "a.pkl"])


@pytest.fixture
def demanding(recipe: Path) -> Path:
    """Make a recipe whose configuration has fields without a default."""
    text = recipe.read_text().replace(
        "width: int = 4", "width: int\n    depth: int\n    seed: int = 1"
    )
    recipe.write_text(text)
    return recipe


def test_fields_without_a_default_are_given(drive: Drive, demanding: Path, tmp_path: Path) -> None:
    given = ("--set", "recipe.width=8", "--set", "recipe.depth=2", "--set", "recipe.seed=3")
    ran = drive("train", demanding, "--out", "run", *given)
    assert ran.code == 0, ran.stderr
    settings = json.loads((tmp_path / "run/config.json").read_text())["settings"]
    assert settings["recipe.width"] == {"value": 8, "source": "command line"}
    assert settings["recipe.seed"] == {"value": 3, "source": "command line"}
    (tmp_path / "a.toml").write_text("[recipe]\nwidth = 8\n")
    ran = drive("explain", demanding, "--config", "a.toml", "--set", "recipe.depth=1", "--json")
    assert ran.code == 0, ran.stderr
    found = schema(demanding)["properties"]["recipe"]["anyOf"][1]["properties"]
    assert found["width"]["type"] == "integer"
    assert found["seed"]["default"] == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "recipe.width, recipe.depth of small.py have no default: give them, as by --set"),
        (("--set", "recipe.width=8"), "recipe.depth of small.py has no default: give it, as by"),
        (
            ("--set", "recipe.width=wide", "--set", "recipe.depth=1"),
            "recipe.width is 'wide', which",
        ),
        (("--set", "recipe.width=1", "--set", "recipe.depth=1", "--set", "recipe.x=1"), "recipe.x"),
    ],
)
def test_fields_that_nobody_gave(
    given: tuple[str, ...], words: str, drive: Drive, demanding: Path
) -> None:
    ran = drive("train", demanding.name, "--out", "run", *given)
    assert ran.code == 2
    assert words in " ".join(ran.stderr.split())
