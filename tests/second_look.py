"""A pytest plugin: each test that failed is run a second time, alone, after all others have ended.

So a test that fails only beside others is distinguished from a fault. It is reported as unstable,
and the run passes. A test that fails again is a failure, and so are more than `MOST` tests that
needed the second look. Nothing is run again in a run without workers (`-n 0`), since each test is
alone there.

With `--base COMMIT`, a test that fails again is run in that commit as well. If it fails there, it
is reported as older, and the run passes: a change is not charged with faults of what it began with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

MOST = 5
"""More tests than these fail together by a fault, and not because the machine is busy."""
NEVER_UNSTABLE = ("tests/house/", "tests/docs/")
"""Folders whose tests only read files, and therefore get no second look."""
NO_FAULT = {
    "unstable": "failed beside others, passed alone",
    "older": "failed in the base commit, too",
}
"""Why tests that failed are counted by themselves, and do not fail the run."""


@dataclass
class Failure:
    """A test that failed beside others, with its reports."""

    nodeid: str
    reports: list[pytest.TestReport] = field(default_factory=list)
    count_as: str = "failed"
    """The outcome of the second look, or one of `NO_FAULT`."""

    def line(self) -> str:
        """Return the test, the seconds of its first run, and what its first failure says."""
        first = self.reports[0]
        crash = getattr(first.longrepr, "reprcrash", None)  # absent if its worker ended
        lines = (crash.message if crash else first.longreprtext).strip().splitlines() or [""]
        seconds = sum(report.duration for report in self.reports)
        return f"{self.nodeid}: {seconds:.0f} s: {lines[0 if crash else -1].strip()[:200]}"


class FileAtATime(LoadFileScheduling):
    """Runs a file by one worker, and a test that ended its worker only once. xdist hands such a
    test to the next worker, until it has no more workers.
    """

    def remove_node(self, node: Any) -> str | None:
        units = self.assigned_work[node]
        left = (test for unit in units.values() for test, is_done in unit.items() if not is_done)
        ended_by = next(left, None)
        if ended_by is not None:
            units[self._split_scope(ended_by)][ended_by] = True
        # a worker that is handed a file without tests would never ask for the next one
        for file in [file for file, unit in units.items() if all(unit.values())]:
            del units[file]
        super().remove_node(node)
        return ended_by

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:  # it replaces another, and still collects
            return
        with suppress(OSError):  # it has ended, which is processed next
            super()._reschedule(node)


class SecondLook:
    """Collects failures in the process that started the workers, and runs them again at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failures: dict[str, Failure] = {}
        self.ended: set[str] = set()

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        return FileAtATime(config, log) if config.getvalue("dist") == "loadfile" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call"):  # where a worker ended, it is neither
            self.ended.add(report.nodeid)
        if report.failed:
            failure = self.failures.setdefault(report.nodeid, Failure(report.nodeid))
            failure.reports.append(report)
            self._say(f"failed: {failure.line()}")

    @pytest.hookimpl(trylast=True)  # once the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_whole = len(self.ended) == session.testscollected
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not is_whole:
            return
        if len(self.failures) > MOST:
            self._say(f"{len(self.failures)} tests failed, more than {MOST}: none is run again")
            return
        self._terminal.write("\n")  # what workers printed at their end may lack it
        for failure in self.failures.values():
            self._look_again(failure)
        if self.failures and all(each.count_as in NO_FAULT for each in self.failures.values()):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_unconfigure(self) -> None:
        if file := self.config.getoption("failures"):
            counted = {each.nodeid: each.count_as for each in self.failures.values()}
            Path(file).write_text(json.dumps(counted))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, why in NO_FAULT.items():
            found = [failure for failure in self.failures.values() if failure.count_as == name]
            for failure in found:
                terminalreporter.section(f"{name}: {failure.nodeid}", sep="_", yellow=True)
                terminalreporter.write_line(failure.reports[0].longreprtext)
            if found:
                terminalreporter.section(f"{name}: {why}", yellow=True)
            for failure in found:
                terminalreporter.write_line(failure.line())

    def _look_again(self, failure: Failure) -> None:
        python = [sys.executable, "-m", "pytest"]
        may_be_unstable = not failure.nodeid.startswith(NEVER_UNSTABLE)
        alone = "a second look, alone"
        if (
            may_be_unstable
            and self._alone(alone, python, failure, self.config.rootpath) == "passed"
        ):
            self._recount(failure, "unstable")
        elif base := self.config.getoption("base"):
            with checked_out(self.config.rootpath, base) as folder:
                has_environment = (folder / "pyproject.toml").exists()
                command = ["uv", "run", "--extra=test", "pytest"] if has_environment else python
                if self._alone(f"and in {base[:10]}", command, failure, folder) == "failed":
                    self._recount(failure, "older")

    def _alone(self, how: str, command: list[str], failure: Failure, folder: Path) -> str:
        """Run the test in a process of its own, and return whether it passed or failed there, or
        could not be run.
        """
        self._say(f"{how}: {failure.nodeid}")
        began = time.monotonic()
        done = subprocess.run(
            [*command, failure.nodeid, "-n=0", "-m="],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        outcomes: dict[int, str] = {
            pytest.ExitCode.OK: "passed",
            pytest.ExitCode.TESTS_FAILED: "failed",
        }
        outcome = outcomes.get(done.returncode, "not run")
        self._say(f"  {outcome} in {time.monotonic() - began:.0f} s")
        return outcome

    def _recount(self, failure: Failure, name: str) -> None:
        """Take the test out of the failures, and count it by itself in the last line."""
        failure.count_as = name
        stats = self._terminal.stats
        for outcome in ("failed", "error"):
            kept = [report for report in stats.get(outcome, ()) if report not in failure.reports]
            stats.pop(outcome, None)
            if kept:
                stats[outcome] = kept
        stats.setdefault(name, []).append(failure.reports[0])

    def _say(self, line: str) -> None:
        self._terminal.ensure_newline()
        self._terminal.write_line(line)

    @property
    def _terminal(self) -> Any:
        return self.config.pluginmanager.get_plugin("terminalreporter")


@contextmanager
def checked_out(repository: Path, commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, for as long as the context lasts."""
    git = ["git", "-C", str(repository), "worktree"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "base")
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "a test that fails in this commit, too, does not fail the run"
    parser.addoption("--base", metavar="COMMIT", help=about)
    about = "write the tests that failed, and how they are counted, into this JSON file"
    parser.addoption("--failures", metavar="FILE", help=about)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondLook(config), "second-look")
