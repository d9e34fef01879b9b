"""The longest tests first; and a part of them that is always the same, by `--shard 2/4`."""

from __future__ import annotations

import itertools
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=one_of, metavar="K/N", help="the tests of part K of 0 to N-1")


ROOMS = ("backends", "faults", "reliability", "cli", "examples", "compat")
"""Whose tests start the most processes; in the others no file keeps one worker long at the end."""


def room(item: pytest.Item) -> int:
    """The place of its folder in that order."""
    folder = item.nodeid.removeprefix("tests/").partition("/")[0]
    return ROOMS.index(folder) if folder in ROOMS else len(ROOMS)


def one_of(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 0 <= int(part) < int(parts):
        raise ValueError(text)
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By the test's name, so that it stays in its part when others come or go."""
    items.sort(key=room)
    if shard := config.getoption("shard"):
        part, parts = shard
        chosen = [zlib.crc32(item.nodeid.encode()) % parts == part for item in items]
        others = itertools.compress(items, (not is_chosen for is_chosen in chosen))
        config.hook.pytest_deselected(items=list(others))
        items[:] = itertools.compress(items, chosen)
