"""Options that keep the test run short, and the order of the files. `--shard 2/4` selects a part of
the tests that is always the same.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

# the conformance suite, which lies below this folder, needs no xdist
pytest_plugins = ["few_cases"]
if importlib.util.find_spec("xdist"):
    pytest_plugins += ["second_look", "load_limit", "hang_stacks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=one_of, metavar="K/N", help="the tests of part K of 0 to N-1")


OUTER_FOLDER = pytest.StashKey[tuple[dict[str, str | None], str | None]]()
CHANGED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a temporary folder of its own, which is removed at its end, since killed
    processes leave files. `tmp_path` stays where pytest keeps it, for inspection.
    """
    if hasattr(config, "workerinput"):
        config.stash[CHANGED] = config.workerinput["changed"]
    else:
        config.stash[CHANGED] = changed(config.rootpath)
        outer = {name: os.environ.get(name) for name in ("TMPDIR", FORK_SERVERS)}
        config.stash[OUTER_FOLDER] = outer, tempfile.tempdir
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="drivetrain-tests-")
        os.environ[FORK_SERVERS] = tempfile.mkdtemp()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Ask once what changed, so that all workers have the same order."""
    node.workerinput["changed"] = node.config.stash[CHANGED]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the outer folder, since a test may run pytest in its own process."""
    if OUTER_FOLDER in config.stash:
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        outer, tempfile.tempdir = config.stash[OUTER_FOLDER]
        for name, value in outer.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


FORK_SERVERS = "DRIVETRAIN_FORK_SERVERS"
"""Environment variable of the conformance suite: workers share the processes that ranks are forked
from, in a folder.
"""

ROOMS = ("backends", "faults", "reliability", "cli", "examples", "compat")
"""Folders whose tests start the most processes. The files of each are spread over the run, so that
tests which wait for a rank run beside tests which compute. The largest begin first. In the other
folders no file keeps one worker long at the end.
"""

CHEAP = ("tests/house/", "tests/docs/")
"""Folders whose tests come before all others: they need seconds, and other work often breaks them.
The tests that a change touched come next.
"""

# several threads on a busy machine wait for each other longer than they compute
os.environ["OMP_NUM_THREADS"] = "1"
# a process that compiles would start others to compile in, each of which imports torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# of what XLA compiles most runs a few times: it need not be fast
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# torch asks the name server for the name of each peer, even on one machine. Where an answer is
# lost, the rank would be 5 seconds late
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# hundreds of processes import the same: let the first one keep the bytecode
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def changed(root: Path) -> list[str]:
    """Return the files that the last commit changed, and those that are changed now."""
    git = ["git", "-C", str(root), "diff", "--name-only", "HEAD~1"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()  # none where there is no such commit


def beginnings(items: list[pytest.Item], first: Collection[str]) -> dict[str, float]:
    """Return where in the run each file begins, as a fraction of the run."""
    largest_first = [file for file, _ in Counter(map(file_of, items)).most_common()]
    rooms = ([file for file in largest_first if file.startswith(f"tests/{r}/")] for r in ROOMS)
    begins = {file: number / len(room) for room in rooms for number, file in enumerate(room)}
    begins |= dict.fromkeys(first, -1.0)
    return begins | {file: -2.0 for file in largest_first if file.startswith(CHEAP)}


def one_of(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 0 <= int(part) < int(parts):
        raise ValueError(text)
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and select the shard by each test's name. A test stays in its shard when
    other tests are added or removed.
    """
    begins = beginnings(items, config.stash[CHANGED])
    items.sort(key=lambda item: begins.get(file_of(item), 1.0))
    if shard := config.getoption("shard"):
        part, parts = shard
        chosen = [zlib.crc32(item.nodeid.encode()) % parts == part for item in items]
        others = itertools.compress(items, (not is_chosen for is_chosen in chosen))
        config.hook.pytest_deselected(items=list(others))
        items[:] = itertools.compress(items, chosen)


def pytest_collection_finish() -> None:
    """Freeze all imported objects, so that garbage collections, which libraries often request, skip
    them.
    """
    gc.freeze()


def launch() -> dict[str, str]:
    """Return the environment variables by which libraries take this process for a rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.fixture(scope="session", autouse=True)
def ranks_can_be_forked() -> None:
    """Let no test that uses torch's fake tensors by itself decide whether later ones can fork."""
    from drivetrain.data.fork_gc import stay_forkable

    stay_forkable()


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_their_file() -> Iterator[None]:
    """Close the pools at the end of a file, since ranks hold memory, and the next file of this
    worker seldom has the same driver.
    """
    before = launch()
    yield
    assert launch() == before, "a test of this file left a launcher's environment behind"
    if harness := sys.modules.get("drivetrain.conformance.harness"):
        harness.close_pools()
