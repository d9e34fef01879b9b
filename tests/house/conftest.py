"""Fixtures that these tests share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from house_rules import ROOT


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a module of `benchmarks`, a folder that is not installed."""
    monkeypatch.syspath_prepend(ROOT)
    threads = torch.get_num_threads()
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
