"""The way to place a run that `auto` takes on several ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Recipe, fit
from drivetrain.kernel.plan import Probe
from drivetrain.planning.automatic import Watchers, device_here, is_small, taken
from drivetrain.planning.devices import find_device
from drivetrain.planning.search import Planned
from drivetrain.registry import memory_of_a_rank
from drivetrain.run.run_folder import read_config

from .searching import RECIPE as LONG
from .searching import SETTINGS, WIDTH, searching, ways

RECIPE = replace(LONG, train_data=TensorDataset(torch.zeros(64, 1, WIDTH)))
"""Its weights need most of the memory of a step."""
CARDS = Probe(True, devices=("NVIDIA H200", "NVIDIA H200"), memory_bytes=280 * 10**9)
HOST = Probe(True, devices=("cpu",), memory_bytes=24 * 10**9)
FULL = replace(SETTINGS, precision="fp32", micro_batch=32)


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_a_rank_has_the_memory_of_its_accelerator(num_ranks: int) -> None:
    assert memory_of_a_rank(CARDS, num_ranks) == 140 * 10**9


def test_ranks_share_the_memory_of_the_host() -> None:
    assert [memory_of_a_rank(HOST, number) for number in (1, 2, 8)] == [24e9, 12e9, 3e9]
    assert memory_of_a_rank(Probe(True), 2) == 0


def test_a_known_device_has_the_speeds_of_its_data_sheet() -> None:
    known, other = device_here(CARDS, 2), device_here(HOST, 2)
    assert known.name == "NVIDIA H200" and known.memory_bytes == 140 * 10**9
    assert known.memory_bytes_per_second == find_device("h200").memory_bytes_per_second
    assert other.name == "cpu, as quick as h100" and other.memory_bytes == 12 * 10**9


def of_weights(number: int) -> Recipe:
    return replace(RECIPE, model=lambda: nn.Linear(1, number, bias=False))


def test_a_model_is_small_if_its_state_takes_half_of_the_memory() -> None:
    assert is_small(of_weights(1000), 32_000) and not is_small(of_weights(1000), 31_999)
    assert is_small(of_weights(1000), 0)  # unknown


def test_nothing_is_looked_at_for_one_rank() -> None:
    assert taken(of_weights(10**12), SETTINGS, (), Watchers(pytest.fail)) is None


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that gives this machine so much memory for each of two ranks."""
    where = "drivetrain.backends.common.layouts.host_memory"
    return lambda num_bytes: monkeypatch.setattr(where, lambda: int(2 * num_bytes))


def needed(backend: str) -> int:
    """Return the bytes that a rank needs by default."""
    search = searching(1e12, ("precision", "micro_batch"), RECIPE)
    found, *_ = search.look(ways(search, backend, FULL)[0])
    assert isinstance(found, Planned)
    return found.total_bytes


def trained(out: Path) -> dict[str, Any]:
    fit(RECIPE, replace(FULL, steps=1), nproc=2, out=out, progress="lines")
    config = read_config(out)
    return {"backend": config["backend"], **config["given"]}


def test_fit_takes_a_driver_that_fits_and_says_so(
    tmp_path: Path, with_memory: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    between = (needed("ddp") + needed("fsdp")) / 2
    with_memory(between / 0.9)
    assert trained(tmp_path / "run")["backend"] == "fsdp"
    (line,) = re.findall("^auto takes .*", capfd.readouterr().err, re.MULTILINE)
    assert "auto takes fsdp" in line and "fit: a rank needs" in line


@pytest.mark.slow
def test_the_next_rank_looks_if_the_first_is_killed_meanwhile(
    tmp_path: Path, with_memory: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    built: list[int] = []

    def model() -> nn.Module:
        """Kill one rank when it builds the model again, which only a rank that looks does."""
        built.append(os.getpid())
        if built.count(os.getpid()) == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return RECIPE.model()

    with_memory(needed("fsdp") / 2)
    settings = replace(FULL, steps=1, recover="in_place")
    result = fit(replace(RECIPE, model=model), settings, nproc=2, out=tmp_path / "run")
    assert result.step == 1 and (tmp_path / "killed").exists()
    printed = capfd.readouterr().err
    assert printed.count("auto takes fsdp") == 1
    assert re.search(r"rank \d has died", printed)


@pytest.mark.slow
def test_what_fits_nowhere_is_tried_where_it_needs_least(
    tmp_path: Path, with_memory: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with_memory(needed("fsdp") / 2)
    assert trained(tmp_path / "run")["backend"] == "fsdp"
    assert "auto takes fsdp" in (err := capfd.readouterr().err)
    assert re.search(r"since none of \d+ ways fits into .*: it needs", err)


@pytest.mark.slow
def test_a_small_model_trains_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path / "run")["backend"] == "ddp"
    assert "auto takes" not in capfd.readouterr().err


@pytest.mark.slow
def test_options_of_a_driver_are_for_the_one_that_auto_takes_by_itself(
    tmp_path: Path, with_memory: Callable[[float], None]
) -> None:
    with_memory(needed("fsdp"))
    options = {"device": "cpu"}
    fit(RECIPE, FULL, nproc=2, backend_options=options, out=tmp_path / "run", progress=False)
    assert read_config(tmp_path / "run")["backend"] == "ddp"
