"""A pytest plugin: each test that failed is run a second time, alone, after all others have ended.

So a test that fails only beside others is distinguished from a fault. It is reported as unstable,
and the run passes. A test that fails again is a failure, and so are more than `MOST` tests that
needed the second look. Nothing is run again in a run without workers (`-n 0`), since each test is
alone there.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

MOST = 5
"""More tests than these fail together by a fault, and not because the machine is busy."""
NEVER_UNSTABLE = ("tests/house/", "tests/docs/")
"""Folders whose tests only read files, and therefore get no second look."""


@dataclass
class Failure:
    """A test that failed beside others, with its reports."""

    nodeid: str
    reports: list[pytest.TestReport] = field(default_factory=list)
    passed_alone: bool = False
    """The outcome of the second look; False without one."""

    def line(self) -> str:
        """Return the test, the seconds of its first run, and what its first failure says."""
        first = self.reports[0]
        crash = getattr(first.longrepr, "reprcrash", None)  # absent if its worker ended
        lines = (crash.message if crash else first.longreprtext).strip().splitlines() or [""]
        seconds = sum(report.duration for report in self.reports)
        return f"{self.nodeid}: {seconds:.0f} s: {lines[0 if crash else -1].strip()}"


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
            self.failures.setdefault(report.nodeid, Failure(report.nodeid)).reports.append(report)

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
            if not failure.nodeid.startswith(NEVER_UNSTABLE):
                self._look_again(failure)
        if self.failures and all(failure.passed_alone for failure in self.failures.values()):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unstable = [failure for failure in self.failures.values() if failure.passed_alone]
        for failure in unstable:
            terminalreporter.section(f"unstable: {failure.nodeid}", sep="_", yellow=True)
            terminalreporter.write_line(failure.reports[0].longreprtext)
        if unstable:
            terminalreporter.section("unstable: failed beside others, passed alone", yellow=True)
        for failure in unstable:
            terminalreporter.write_line(failure.line())

    def _look_again(self, failure: Failure) -> None:
        self._say(f"a second look, alone: {failure.nodeid}")
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", failure.nodeid, "-n=0", "-m="]
        done = subprocess.run(
            command,
            cwd=self.config.rootpath,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        failure.passed_alone = done.returncode == pytest.ExitCode.OK
        how = "passed" if failure.passed_alone else "failed again"
        self._say(f"  {how} in {time.monotonic() - began:.0f} s")
        if failure.passed_alone:
            self._is_unstable(failure)

    def _is_unstable(self, failure: Failure) -> None:
        """Take the test out of the failures, and count it by itself in the last line."""
        stats = self._terminal.stats
        for outcome in ("failed", "error"):
            kept = [report for report in stats.get(outcome, ()) if report not in failure.reports]
            stats.pop(outcome, None)
            if kept:
                stats[outcome] = kept
        stats.setdefault("unstable", []).append(failure.reports[0])

    def _say(self, line: str) -> None:
        self._terminal.ensure_newline()
        self._terminal.write_line(line)

    @property
    def _terminal(self) -> Any:
        return self.config.pluginmanager.get_plugin("terminalreporter")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondLook(config), "second-look")
