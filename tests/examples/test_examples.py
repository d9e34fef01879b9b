"""The examples run as users run them, and do what their first lines promise."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Record = dict[str, Any]


def run(*arguments: str, folder: Path, **environment: str) -> str:
    """Return the output of a Python command, which must not fail."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(name: str, folder: Path, *arguments: str, **environment: str) -> list[Record]:
    """Return the records of `drivetrain train examples/NAME ...` on the CPU."""
    command = ["-m", "drivetrain.cli", "train", str(EXAMPLES / name), "--backend", "cpu"]
    shown = run(*command, "--json", "--out", "run", *arguments, folder=folder, **environment)
    return [json.loads(line) for line in shown.splitlines()]


def metrics(records: list[Record]) -> dict[str, float]:
    """Return the metrics of the held-out part at the end of a run."""
    assert records[-1]["event"] == "result" and records[-1]["reason"] == "finished"
    figures: dict[str, float] = records[-1]["metrics"]["held_out"]
    return figures


@pytest.mark.slow
def test_digits_are_recognised(tmp_path: Path) -> None:
    records = train("digits.py", tmp_path)
    assert metrics(records)["accuracy"] >= 0.97
    assert {"loss", "accuracy"} == set(metrics(records))
    assert Path(tmp_path, records[-1]["checkpoint"], "manifest.json").is_file()


@pytest.mark.slow
def test_the_python_api_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = run(str(EXAMPLES / "python_api.py"), folder=tmp_path).splitlines()
    assert first.startswith("step 230: ")
    assert second.startswith("step 276: ")
    report = second.removeprefix("step 276: ").partition(", saved in ")
    assert ast.literal_eval(report[0])["accuracy"] >= 0.97
    assert Path(tmp_path, report[2], "manifest.json").is_file()


def test_the_python_api_is_short() -> None:
    lines = (EXAMPLES / "python_api.py").read_text().splitlines()
    code = [line for line in lines if line and not line.startswith(("#", '"""'))]
    assert len(code) <= 15


@pytest.mark.slow
def test_the_gpt_learns_from_texts_of_one_s_own(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"The answer to question {number} is known. " * 100)
    chosen = ["folder=texts", "pattern=*.txt", "width=32", "layers=1", "heads=2", "context=64"]
    records = train(
        "gpt.py",
        tmp_path,
        *("--steps", "60"),
        *(word for value in chosen for word in ("--set", f"recipe.{value}")),
    )
    assert metrics(records)["bits_per_byte"] < 4  # 8 knows nothing
    assert next(record for record in records if record["event"] == "logged")["item_name"] == "bytes"
    assert records[-1]["sample"]


@pytest.mark.slow
def test_minilm_starts(tmp_path: Path) -> None:
    """Train three steps with the model's real weights, from texts to metrics."""
    short = ("recipe.max_tokens=8", "recipe.eval_texts=40", "checkpoint.at_end=false")
    options = [word for value in short for word in ("--set", value)]
    records = train("minilm.py", tmp_path, "--steps", "3", *options, HF_HUB_OFFLINE="1")
    figures = metrics(records)
    assert records[0]["num_parameters"] > 22_000_000
    assert 0.1 < figures["majority_accuracy"] < 0.3
    assert 0 <= figures["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_minilm_beats_the_majority(tmp_path: Path) -> None:
    records = train("minilm.py", tmp_path, HF_HUB_OFFLINE="1")
    figures = metrics(records)
    assert figures["accuracy"] >= 0.7  # 0.8 is usual
    assert figures["mean_class_accuracy"] >= 0.6
    assert figures["majority_accuracy"] < 0.3
