"""What makes the run short: one thread a process, and the order of the files; and a part of the
tests that is always the same, by `--shard 2/4`."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=one_of, metavar="K/N", help="the tests of part K of 0 to N-1")


ROOMS = ("backends", "faults", "reliability", "cli", "examples", "compat")
"""Whose tests start the most processes: the files of each are spread over the run, so that those
that wait for a rank stand beside those that compute, and the largest begin first. In the other
folders no file keeps one worker long at the end."""

# several threads on a busy machine wait for each other longer than they compute
os.environ["OMP_NUM_THREADS"] = "1"
# of what XLA compiles most runs a few times: it need not be fast
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# hundreds of processes import the same: let the first one keep the bytecode
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def beginnings(items: list[pytest.Item]) -> dict[str, float]:
    """When each file of these rooms begins, as a part of the run."""
    largest_first = [file for file, _ in Counter(map(file_of, items)).most_common()]
    rooms = ([file for file in largest_first if file.startswith(f"tests/{r}/")] for r in ROOMS)
    return {file: number / len(room) for room in rooms for number, file in enumerate(room)}


def one_of(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 0 <= int(part) < int(parts):
        raise ValueError(text)
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By the test's name, so that it stays in its part when others come or go."""
    begins = beginnings(items)
    items.sort(key=lambda item: begins.get(file_of(item), 1.0))
    if shard := config.getoption("shard"):
        part, parts = shard
        chosen = [zlib.crc32(item.nodeid.encode()) % parts == part for item in items]
        others = itertools.compress(items, (not is_chosen for is_chosen in chosen))
        config.hook.pytest_deselected(items=list(others))
        items[:] = itertools.compress(items, chosen)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection, of which libraries ask for many, walks it again."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_their_file() -> Iterator[None]:
    """The next file of this worker seldom has the same driver, and ranks hold memory. Two that
    have imported torch stay, to be forked for those of the next."""
    yield
    if harness := sys.modules.get("drivetrain.conformance.harness"):
        harness.close_pools(kept_servers=2)
