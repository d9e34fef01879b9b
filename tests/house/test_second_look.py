"""A test that fails only beside others is distinguished from a fault, in scratch suites."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from house_rules import ROOT
from scratch_suites import OPTIONS, environment, last_line, run, write

PASSES = "def test_passes(): pass\n"
UNSTABLE = """
from pathlib import Path
def test_unstable():
    before = Path("seen").exists()
    Path("seen").touch()
    assert before, "not seen before"
"""
BROKEN = "def test_broken(): assert False, 'broken for good'\n"
ENDS_ITS_WORKER = """
import os
from pathlib import Path
def test_first(): pass
def test_ends_its_worker():
    with open("lives", "a") as lives: lives.write("x")
    os._exit(1)
def test_after(): pass
"""
ENDS_ITS_WORKER_ONCE = """
import os
from pathlib import Path
def test_ends_its_worker_once():
    if not Path("ended").exists():
        Path("ended").touch()
        os._exit(1)
"""
COLLECTS_LATE = """
import os, time
pytest_plugins = ["second_look"]
def pytest_collection():
    time.sleep({"gw2": 1, "gw3": 2}.get(os.environ.get("PYTEST_XDIST_WORKER"), 0))
"""
SETUP_FAILS_ONCE = """
import pytest
from pathlib import Path
@pytest.fixture
def server():
    if not Path("asked").exists():
        Path("asked").touch()
        raise OSError("no server")
def test_with_a_server(server): pass
"""


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", *who, *command], cwd=folder, text=True).strip()


def commit(folder: Path, suite: dict[str, str]) -> str:
    """Write a suite into a repository, and return the name of its commit."""
    write(folder, suite)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=base")
    return git(folder, "rev-parse", "HEAD")


def test_an_unstable_test_is_reported_and_does_not_fail_the_run(tmp_path: Path) -> None:
    suite = {"test_a.py": PASSES, "test_b.py": UNSTABLE, "test_c.py": SETUP_FAILS_ONCE}
    status, printed = run(tmp_path, suite)
    assert status == 0, printed
    assert last_line(printed) == "1 passed, 2 unstable"
    whole, _, unstable = printed.partition("unstable: failed beside others, passed alone")
    assert "def test_unstable():" in whole and "raise OSError" in whole
    assert re.search(r"test_b\.py::test_unstable: \d+ s: AssertionError: not seen be", unstable)
    assert re.search(r"test_c\.py::test_with_a_server: \d+ s: OSError: no server", unstable)


def test_a_broken_test_fails_the_run_beside_an_unstable_one(tmp_path: Path) -> None:
    suite = {"test_a.py": PASSES, "test_b.py": UNSTABLE, "test_c.py": BROKEN}
    status, printed = run(tmp_path, suite)
    assert status == 1, printed
    assert last_line(printed) == "1 failed, 1 passed, 1 unstable"
    assert "broken for good" in printed and "  failed in " in printed


def test_a_test_that_ends_its_worker_is_run_twice_and_its_neighbours_once(tmp_path: Path) -> None:
    suite = {"test_a.py": ENDS_ITS_WORKER, "test_b.py": PASSES, "test_c.py": ENDS_ITS_WORKER_ONCE}
    status, printed = run(tmp_path, suite)
    assert status == 1, printed
    assert last_line(printed) == "1 failed, 3 passed, 1 unstable"
    assert (tmp_path / "lives").read_text() == "xx"
    assert re.search(r"test_c\.py::test_ends_its_worker_once: 0 s: worker 'gw\d' crashed", printed)


@pytest.mark.slow
def test_two_workers_that_end_together_are_replaced(tmp_path: Path) -> None:
    """The first of the new workers is there while the second still collects."""
    suite = {f"test_{name}.py": PASSES for name in "cdefgh"}
    suite |= {"test_a.py": ENDS_ITS_WORKER_ONCE, "conftest.py": COLLECTS_LATE}
    suite["test_b.py"] = ENDS_ITS_WORKER_ONCE.replace('"ended"', '"ended too"')
    status, printed = run(tmp_path, suite)
    assert status == 0, printed
    assert last_line(printed) == "6 passed, 2 unstable"


def test_a_test_that_failed_in_the_base_commit_does_not_fail_the_run(tmp_path: Path) -> None:
    new = BROKEN.replace("test_broken", "test_new")
    base = commit(tmp_path, {"test_a.py": PASSES, "test_b.py": BROKEN, "test_c.py": PASSES})
    suite = {"test_b.py": BROKEN + PASSES, "test_c.py": new}
    status, printed = run(tmp_path, suite, "--base", base)
    assert status == 1, printed
    assert last_line(printed) == "1 failed, 2 passed, 1 older"
    assert re.search(r"FAILED test_c\.py::test_new", printed)
    _, _, older = printed.partition("older: failed in the base commit, too")
    assert re.search(r"test_b\.py::test_broken: \d+ s: AssertionError: broken for good", older)

    status, printed = run(tmp_path, {"test_c.py": PASSES}, "--base", base)
    assert status == 0, printed
    assert last_line(printed) == "3 passed, 1 older"
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1


def test_a_failure_is_reported_at_once(tmp_path: Path) -> None:
    _, printed = run(tmp_path, {"test_a.py": BROKEN, "test_b.py": PASSES})
    at_once = printed.index("failed: test_a.py::test_broken: 0 s: AssertionError: broken for good")
    assert at_once < printed.index("= FAILURES =")


def test_more_failures_than_load_explains_are_not_run_again(tmp_path: Path) -> None:
    suite = {f"test_{n}.py": UNSTABLE.replace("seen", f"seen{n}") for n in range(6)}
    status, printed = run(tmp_path, suite)
    assert status == 1, printed
    assert last_line(printed) == "6 failed"
    assert "6 tests failed, more than 5: none is run again" in printed


def test_tests_that_only_read_files_are_not_run_again(tmp_path: Path) -> None:
    status, printed = run(tmp_path, {"tests/house/test_a.py": UNSTABLE, "test_b.py": PASSES})
    assert status == 1, printed
    assert last_line(printed) == "1 failed, 1 passed"
    assert "a second look" not in printed


def test_a_run_that_was_cut_short_stays_a_failure(tmp_path: Path) -> None:
    suite = {"test_a.py": ENDS_ITS_WORKER_ONCE, "test_b.py": PASSES, "test_c.py": PASSES}
    status, printed = run(tmp_path, suite, "-n=1", "--max-worker-restart=0")
    assert status == 1, printed
    assert "a second look" not in printed


def test_a_run_without_workers_has_no_second_look(tmp_path: Path) -> None:
    status, printed = run(tmp_path, {"test_a.py": UNSTABLE}, "-n=0")
    assert status == 1, printed
    assert last_line(printed) == "1 failed"


@pytest.mark.slow
def test_runs_are_repeated_and_what_failed_is_counted(tmp_path: Path) -> None:
    """`steady.py` runs a suite twice, beside a busy process: an unstable test fails once."""
    write(tmp_path, {"test_a.py": UNSTABLE, "test_b.py": BROKEN, "test_c.py": PASSES})
    steady = [sys.executable, str(ROOT / "tests" / "steady.py")]
    done = subprocess.run(
        [*steady, "--runs=2", "--busy=1", "--", *OPTIONS],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"\| 1 \| red \(1\) \| 1 failed, 1 passed, 1 unstable in .*\|", done.stdout)
    assert re.search(r"\| 2 \| red \(1\) \| 1 failed, 2 passed in .*\|", done.stdout)
    assert "| `test_a.py::test_unstable` | 1 of 2 | 0 |\n" in done.stdout
    assert "| `test_b.py::test_broken` | 2 of 2 | 2 |\n" in done.stdout
