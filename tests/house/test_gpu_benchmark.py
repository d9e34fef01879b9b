"""The benchmark of one GPU: run in small on the host, and its evaluation of a trace and a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from house_rules import ROOT
from torch.autograd import DeviceType

Import = Callable[[str], Any]


@pytest.fixture
def gpu(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = benchmark_module("gpu")
    monkeypatch.setattr(module, "DEVICE", "cpu")  # as where there is none
    return module


def in_small(candidate: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.one", "gpu", candidate, "--quick"]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=no_gpu, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1].partition(": ")[2])
    return figures


@pytest.mark.slow
def test_the_kernel_trains_and_saves_what_the_raw_loop_trains() -> None:
    ours, raw = in_small("kernel"), in_small("raw")
    assert ours["parameters"] == raw["parameters"]
    assert ours["loss"] == pytest.approx(raw["loss"], rel=1e-4)
    assert ours["saved"] >= 12 * ours["parameters"]  # weights and two moments, in four bytes each


@pytest.mark.slow
@pytest.mark.parametrize("candidate", ["fsdp", "deepspeed", "hugging_face"])
def test_the_others_train_the_same(candidate: str) -> None:
    assert in_small(candidate)["loss"] == pytest.approx(in_small("raw")["loss"], rel=1e-2)


def test_without_a_gpu_it_is_refused_and_listed_as_such(
    gpu: Any, benchmark_module: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    main = benchmark_module("__main__").main
    with pytest.raises(typer.BadParameter, match="gpu: torch sees no CUDA"):
        main(["gpu"])
    with pytest.raises(typer.BadParameter, match="gpu: torch sees no CUDA"):
        main(["gpu"], quick=True, document=True)
    main(["list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed if "not here: torch sees no CUDA" in line] == ["gpu"]


def test_the_page_says_that_nothing_was_measured_on_a_gpu(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    report = benchmark_module("report")
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    page = report.page()
    assert "No figure on this page was taken on a GPU" in page
    assert "- `step`: A step of a tiny MLP\n" in page


def test_operations_of_a_token_are_palm_s(gpu: Any) -> None:
    job = gpu.LARGE
    parameters = 1_000_000_000
    assert job.operations_per_token(parameters) == 6e9 + 12 * 18 * 2048 * 2048


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("a card of next year", None),
    ],
)
def test_a_card_s_peak_is_known_by_its_name(gpu: Any, card: str, peak: float | None) -> None:
    assert gpu.peak_of(card) == peak


def event(name: str, start: float, end: float, device: Any = DeviceType.CUDA, **more: Any) -> Any:
    interval = SimpleNamespace(start=start, end=end)
    known = {"is_user_annotation": False, **more}
    return SimpleNamespace(name=name, device_type=device, time_range=interval, **known)


def test_copies_overlap_where_a_kernel_runs(benchmark_module: Import) -> None:
    overlap_of = benchmark_module("trace").overlap_of
    events = [
        event("Memcpy HtoD (Pinned -> Device)", 0, 10),
        event("Memcpy HtoD (Pinned -> Device)", 20, 30),
        event("gemm", 4, 8),
        event("gelu", 6, 12),  # beside the one before
        event("Memset (Device)", 20, 30),
        event("Memcpy DtoH (Device -> Pinned)", 20, 30),
        event("a step", 0, 40, is_user_annotation=True),
        event("aten::mm", 0, 40, DeviceType.CPU),
    ]
    assert overlap_of(events) == {"overlap": 6 / 20}
    assert overlap_of(events[2:]) == {}  # nothing was copied
