"""A pytest plugin: of a test with many cases that show much the same, a few are quick.

`@pytest.mark.few(3)`: three cases, spread over all of them, are run with each change. The others
are marked `slow`. Where it matters which cases are quick, `only_quick` names them instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def only_quick(values: Iterable[Any], quick: Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Return `values` as the cases of a test, all but those in `quick` marked `slow`. A tuple has a
    value for each of several arguments. `quick` may be a function that returns True for its cases.
    """
    cases = []
    for value in values:
        is_quick = quick(value) if callable(quick) else value in quick
        several = value if isinstance(value, tuple) else (value,)
        cases.append(pytest.param(*several, marks=() if is_quick else pytest.mark.slow))
    return cases


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for those in cases.values():
        mark = those[0].get_closest_marker("few")
        assert mark is not None
        quick = {index * len(those) // mark.args[0] for index in range(mark.args[0])}
        for index, item in enumerate(those):
            if index not in quick:
                item.add_marker(pytest.mark.slow)
