"""`drivetrain predict`: each sample's outputs once, in order; the file is complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
from command_line import Drive

from drivetrain.cli.training.prediction_files import check_output, prediction_file
from drivetrain.kernel.errors import OutputError, RecipeError
from drivetrain.trainer.predictions import Chunk

PREDICT = """

def predict(module, batch):
    outputs = module(batch["x"])
    return {"sum": outputs[:, 0], "both": {"x": batch["x"], "half": outputs.bfloat16()}}
"""


@pytest.fixture
def trained(drive: Drive, recipe: Path) -> Path:
    """Make a recipe with `predict`, and the folder `run` of a run beside it."""
    recipe.write_text(recipe.read_text().replace("Points(8)", "Points(45)") + PREDICT)
    assert drive("train", recipe, "--backend", "cpu", "--out", "run").code == 0
    return recipe


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def test_predictions(drive: Drive, trained: Path, tmp_path: Path) -> None:
    ran = drive("predict", "run", "--out", "a.parquet", "--backend", "cpu", "--json")
    assert ran.code == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert (record["out"], record["data"], record["samples"]) == ("a.parquet", "held_out", 45)
    assert record["columns"] == {
        "sum": "float32[]",
        "both.x": "float32[3]",
        "both.half": "float32[1]",
    }
    rows = read(tmp_path / "a.parquet")
    assert [row["index"] for row in rows] == list(range(45))
    points = torch.randn(45, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.tensor([row["both.x"] for row in rows]), points)
    for row in rows:
        assert row["both.half"][0] == pytest.approx(row["sum"], rel=1e-2, abs=1e-2)
    ran = drive("predict", "run", "--out", "a.jsonl", "--set", "micro_batch=7")
    assert ran.code == 0 and "a.jsonl: 45 samples of held_out" in ran.stdout
    assert [row["index"] for row in read(tmp_path / "a.jsonl")] == list(range(45))
    for row, other in zip(read(tmp_path / "a.jsonl"), rows, strict=True):
        assert row["sum"] == pytest.approx(other["sum"], rel=1e-5, abs=1e-6)
    ran = drive("predict", "run", trained, "--data", "train_data", "--out", "b.jsonl", "--json")
    assert json.loads(ran.stdout)["samples"] == 40


@pytest.mark.slow
def test_two_ranks_write_each_sample_once(drive: Drive, trained: Path, tmp_path: Path) -> None:
    drive("predict", "run", "--out", "one.parquet", "--backend", "cpu")
    words = ("predict", "run", "--out", "two.parquet", "--backend", "ddp", "--nproc", "2")
    (temporary := tmp_path / "temporary").mkdir()
    ran = drive(*words, "--set", "micro_batch=3", "--json", TMPDIR=str(temporary))
    assert ran.code == 0, ran.stderr
    assert not list(temporary.glob("torchelastic_*"))
    assert '"samples": 45' in ran.stdout and ran.stdout.count("samples") == 1
    one, two = (read(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert [row["index"] for row in two] == list(range(45))
    for row, other in zip(one, two, strict=True):
        assert row["both.x"] == other["both.x"]
        assert row["sum"] == pytest.approx(other["sum"], rel=1e-5, abs=1e-6)


PEAK = """
import pathlib

def predict(module, batch):
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    pathlib.Path("peak").write_text(peak)
    return batch["x"].mean(1, keepdim=True).expand(-1, 2048)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_predictions(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    text = recipe.read_text() + PEAK
    assert drive("train", recipe, "--backend", "cpu", "--out", "run").code == 0
    peaks = []
    for samples in (3_000, 30_000):
        recipe.write_text(text.replace("Points(8)", f"Points({samples})"))
        words = ("--backend", "cpu", "--set", "micro_batch=64")
        ran = drive("predict", "run", recipe, "--out", "many.parquet", *words)
        assert ran.code == 0, ran.stderr
        peaks.append(int((tmp_path / "peak").read_text()) * 1024)
    written = 27_000 * 2048 * 4
    assert peaks[1] - peaks[0] < written / 4
    file = pyarrow.parquet.ParquetFile(tmp_path / "many.parquet")
    assert file.metadata.num_rows == 30_000 and file.metadata.num_row_groups <= 16


def test_what_cannot_be_predicted_is_refused(drive: Drive, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "kept.jsonl").write_text("kept")
    broken, several, wrong = (tmp_path / f"{name}.py" for name in ("broken", "several", "wrong"))
    text = trained.read_text()
    broken.write_text(text.replace("outputs[:, 0]", "outputs[0]"))
    several.write_text(text.replace('{"held_out": ', '{"more": Points(3), "held_out": '))
    wrong.write_text(
        text.replace("def predict(module, batch)", "predict = 3\ndef other(module, batch)")
    )
    for words, message in (
        (("run", "--out", "a.csv"), "must end in .parquet or .jsonl"),
        (("run", "--out", "none/a.jsonl"), "no folder none"),
        (("empty", "--out", "a.jsonl"), "empty"),
        (("run", "--data", "test", "--out", "a.jsonl"), "held_out, train_data"),
        (("run", several, "--out", "a.jsonl"), "more, held_out, train_data"),
        (("run", wrong, "--out", "a.jsonl"), "predict of"),
        (("run", broken, "--out", "kept.jsonl"), "one row for each sample"),
        (("run", "--set", "recipe.width=9", "--out", "a.jsonl"), "0.weight"),
    ):
        ran = drive("predict", *words)
        assert ran.code == 2, (words, ran.stderr)
        assert message in " ".join(ran.stderr.split()), ran.stderr
    assert (tmp_path / "kept.jsonl").read_text() == "kept"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".writing")]


def chunk(first: int, outputs: Any) -> Chunk:
    return Chunk(first, len(outputs), outputs)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_every_shape_and_number_comes_back(suffix: str, tmp_path: Path) -> None:
    deep = torch.arange(48.0).view(2, 4, 3, 2)
    odd = torch.tensor([[float("nan"), 1.0], [float("inf"), -2.0]])
    for name, value in {
        "deep": deep,
        "odd": odd,
        "none": torch.empty(2, 0, 3),
        "bool": torch.tensor([True, False]),
        "long": torch.tensor([2**62, -1]),
    }.items():
        path = tmp_path / f"{name}.{suffix}"
        with prediction_file(path) as take:
            take(chunk(0, value))
            take(chunk(2, value.flip(0)))
        rows = read(path)
        assert [row["index"] for row in rows] == [0, 1, 2, 3]
        found = numpy.array([row["output"] for row in rows], dtype=object)
        expected = torch.cat((value, value.flip(0))).numpy()
        if suffix == "jsonl" and name == "odd":
            expected = numpy.where(numpy.isfinite(expected), expected.astype(object), None)
            assert found.tolist() == expected.tolist()
        else:
            same = found.astype(expected.dtype).reshape(expected.shape)
            numpy.testing.assert_array_equal(same, expected)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("before")

    def fail() -> None:
        with prediction_file(path) as take:
            take(chunk(0, torch.ones(2)))
            assert path.read_text() == "before"
            take(Chunk(2, 2, {"index": torch.ones(2)}))

    with pytest.raises(RecipeError, match="'index'"):
        fail()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(OutputError, match=r"drivetrain\[parquet\]"):
        check_output(tmp_path / "a.parquet")
    check_output(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        check_output(tmp_path / "b.jsonl")
