"""Options that find mistakes in a recipe: --fast, --overfit, --detect-anomaly, breakpoint()."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Drive

from drivetrain import Batches, DataSettings, EvaluateSettings, Mix, Recipe, Settings
from drivetrain.kernel.errors import SettingError
from drivetrain.trainer.fit import fit


@pytest.mark.slow
def test_fast_tries_every_part(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    ran = drive("train", recipe, "--fast", "--set", "recipe.width=8", "--steps", "100")
    assert ran.code == 0, ran.stderr
    for part in ("step 2/2", "held_out: loss", "resumed at step 2", "step 4/4", "a <sample>"):
        assert part in ran.stdout
    assert "all of it works" in ran.stderr
    assert "--resume" not in ran.stdout
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] in ([], ["__pycache__"])


@pytest.mark.slow
def test_fast_says_which_part_fails(drive: Drive, recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "\nimport nothing_of_that_name\n")
    ran = drive("train", recipe, "--fast")
    assert ran.code == 1
    assert "training, evaluating and saving failed" in ran.stderr
    refused = drive("train", recipe, "--fast", "--out", "run")
    assert refused.code == 2
    assert "leave --out out" in refused.stderr


def test_the_flags_are_settings(drive: Drive, recipe: Path) -> None:
    words = ("--overfit", 3, "--plain", "--set", "global_batch=3", "--steps", 2, "--json")
    ran = drive("train", recipe, "--out", "run", "--set", "log_every=1", "--stats", 2, *words)
    assert ran.code == 0, ran.stderr
    started, *_ = (r for r in ran.records() if r["event"] == "run_started")
    assert started["num_samples"] == 3
    assert [record["step"] for record in ran.records() if record["event"] == "stats"] == [2]
    recipe.write_text(recipe.read_text().replace("** 2).sum()", "** 2).log().mul(0).sqrt().sum()"))
    ran = drive("train", recipe, "--out", "bad", "--detect-anomaly", "--steps", 2)
    assert ran.code == 1
    assert "returned nan values" in " ".join(ran.stderr.split())
    assert "small.py" in ran.stderr


DATA = [(torch.tensor([float(n)]),) for n in range(20)]
SETTINGS = Settings(
    steps=6,
    global_batch=2,
    data=DataSettings(overfit=4),
    evaluate=EvaluateSettings(sanity_check=False),
)


def stream() -> Iterator[Any]:
    return iter(DATA)


@pytest.mark.parametrize("data", [DATA, stream])
@pytest.mark.parametrize("eval_data", [{}, {"held_out": DATA, "other": DATA}])
def test_overfit_sees_the_first_samples_alone(data: Any, eval_data: dict[str, Any]) -> None:
    seen: dict[bool, list[float]] = {True: [], False: []}

    def loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        seen[module.training] += batch[0].flatten().tolist()
        return module(batch[0]).square().sum()

    recipe = Recipe(lambda: torch.nn.Linear(1, 1), loss, data, eval_data=eval_data)
    result = fit(recipe, SETTINGS, backend="cpu")
    assert sorted(seen[True]) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sorted(seen[False]) == sorted([0, 1, 2, 3] * max(1, len(eval_data)))
    assert [*result.metrics] == ([*eval_data] or ["overfit"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Batches(torch.utils.data.DataLoader(DATA)), "your loader makes the batches"),  # type: ignore[arg-type]
        (Mix({"a": (DATA, 1.0)}), "it is drawn"),
    ],
)
def test_overfit_needs_first_samples(data: Any, words: str) -> None:
    recipe = Recipe(lambda: torch.nn.Linear(1, 1), lambda module, batch: batch, data)
    with pytest.raises(SettingError, match=words):
        fit(recipe, dataclasses.replace(SETTINGS), backend="cpu")


SCRIPT = """
import torch
from drivetrain import EvaluateSettings, Recipe, Settings, fit
calls = []
def loss(module, batch):
    calls.append(1)
    if len(calls) == 3:
        breakpoint()
        here = "in the loss"
    return module(batch[0]).square().sum()
data = torch.utils.data.TensorDataset(torch.ones(8, 1))
evaluate = EvaluateSettings(sanity_check=False)
settings = Settings(steps=6, global_batch=2, log_every=1, evaluate=evaluate)
fit(Recipe(lambda: torch.nn.Linear(1, 1), loss, data), settings, backend="cpu")
"""


def read_until(terminal: int, word: bytes, seconds: float) -> bytes:
    """Return the output up to that word, or until the time is up."""
    found, end = b"", time.monotonic() + seconds
    while word not in found and (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                found += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
    return found


@pytest.mark.slow
def test_a_breakpoint_has_the_terminal_to_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        before = read_until(ours, b"(Pdb) ", 60)
        assert b"(Pdb) " in before, before
        assert b'here = "in the loss"' in before  # the line after the breakpoint
        assert read_until(ours, b"nothing of this", 1.0) == b""  # the bar would come 10 times
        os.write(ours, b"p calls\n")
        assert b"[1, 1, 1]" in read_until(ours, b"(Pdb) ", 10)
        os.write(ours, b"c\n")
        after = read_until(ours, b"finished at step 6", 60)
        assert b"step 6/6" in after, after
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)


def test_the_summary_of_a_model(drive: Drive, recipe: Path) -> None:
    ran = drive("summary", recipe, "--set", "recipe.width=8", "--json")
    assert ran.code == 0, ran.stderr
    first, last, whole = json.loads(ran.stdout)
    assert (first["name"], first["kind"], first["output"]) == ("0", "Linear", "4 x 8")
    assert (first["parameters"], first["trainable"], first["num_bytes"]) == (32, 32, 128)
    assert last["output"] == "4 x 1"
    assert whole["parameters"] == first["parameters"] + last["parameters"]
    recipe.write_text("""
import torch
from drivetrain import Recipe
data = torch.utils.data.TensorDataset(torch.ones(8, 3))
recipe = Recipe(
    model=lambda: torch.nn.Linear(3, 2), loss=lambda m, b: m(b[0]).sum(), train_data=data
)
""")
    assert "(the model)" in drive("summary", recipe).stdout  # it has no modules below it
    gpt = drive("summary", "--depth", 2, COLUMNS="80")
    assert "blocks.0 (6 alike)" in gpt.stdout
    assert "2,714,112 parameters" in gpt.stdout


def test_searches_from_the_command_line(drive: Drive, recipe: Path) -> None:
    ran = drive("find", "learning-rate", recipe, "--steps", 40, "--low", "1e-4", "--json")
    assert ran.code == 0, ran.stderr
    assert {*json.loads(ran.stdout)} == {"rates", "losses", "suggestion"}
    ran = drive("find", "micro-batch", recipe, "--most", 4)
    assert ran.code == 0, ran.stderr
    assert "the largest that fits is 4: --set micro_batch=4" in ran.stdout
