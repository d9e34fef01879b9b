"""The pytest plugin: options, the report, and a red run when nothing was proved.

Load it with `-p drivetrain.conformance.plugin`. It serves test files that use `cases` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ..kernel.errors import DrivetrainError
from ..registry import known_backends
from .cases import Case
from .expected import expected
from .harness import WorkerFailure
from .report import Run, write_report

__all__ = ["EXIT_UNAVAILABLE"]

EXIT_UNAVAILABLE = 69
"""Exit code when the driver cannot run on this machine (`EX_UNAVAILABLE`)."""

RECORD = "drivetrain.conformance"


OPTIONS: dict[str, dict[str, Any]] = {
    "--backend": {"metavar": "NAME", "help": "the driver to prove"},
    "--nproc": {"type": int, "metavar": "N", "help": "processes; by default 2 if it can"},
    "--backend-set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "an option of the driver; repeatable",
    },
    "--peer": {
        "action": "append",
        "metavar": "NAME[:N]",
        "help": "a driver to exchange checkpoints with, in N processes; repeatable; by default the "
        "driver itself in other numbers of processes",
    },
    "--report": {"type": Path, "metavar": "DIR", "help": "write JSON and an HTML page there"},
    "--allow-unavailable": {
        "action": "store_true",
        "help": "a driver that cannot run here is reported and not an error",
    },
}
"""Options of the plugin, with the arguments of argparse."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("drivetrain", "drivetrain conformance")
    for name, details in OPTIONS.items():
        group.addoption(name, **details)


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("backend")
    if backend is not None and backend not in known_backends():
        known = ", ".join(known_backends())
        raise pytest.UsageError(f"--backend {backend}: no such driver. Known: {known}")
    if not hasattr(config, "workerinput"):  # the workers of xdist send their results here
        config.pluginmanager.register(Ledger(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say once, not for each law, that the driver cannot run here."""
    case = case_of(item)
    distributed = hasattr(item.config, "workerinput")
    if (
        case is None
        or case.allow_unavailable
        or distributed
        or not item.config.getoption("backend")
    ):
        return
    try:
        case.subject.require_usable()
    except (DrivetrainError, WorkerFailure) as error:
        pytest.exit(str(error), returncode=EXIT_UNAVAILABLE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    case = case_of(item)
    if case is not None and call.when == "call":
        error = str(call.excinfo.value) if call.excinfo else ""
        status = {"skipped": "unavailable"}.get(report.outcome, report.outcome)
        if case.refused is not None:
            status, error = "refused", case.refused.message
        report.user_properties.append(
            (
                RECORD,
                {**case.to_json(), "status": status, "message": error, "seconds": call.duration},
            )
        )
    return report


def case_of(item: pytest.Item) -> Case | None:
    """The case that a test was parametrized with."""
    specification = getattr(item, "callspec", None)
    case = specification.params.get("case") if specification else None
    return case if isinstance(case, Case) else None


def broken(result: Mapping[str, Any]) -> str:
    """A case and the whole of what is wrong; further lines of it, as of a crash, are indented."""
    arguments = "".join(f" {key}={value}" for key, value in result["arguments"].items())
    message = result["message"].strip().replace("\n", "\n    ")
    return f"FAILED {result['law']} {result['check']}{arguments}: {message}"


class Ledger:
    """Collects the results of all cases of this run of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.runs: dict[str, Run] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        cases = [case for item in session.items if (case := case_of(item)) is not None]
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if cases and reporter is not None and not self.config.getoption("collectonly"):
            reporter.write_line(expected(cases, self.config.getoption("report")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, record in report.user_properties:
                if name == RECORD and isinstance(record, dict):
                    run = Run.of(record)
                    self.runs.setdefault(run.key, run).add(record)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        ran = any(run.counts["unavailable"] < len(run.results) for run in self.runs.values())
        excused = self.config.getoption("allow_unavailable") and self.runs
        collecting = self.config.getoption("collectonly")
        if (
            exitstatus == 0
            and not (ran or excused or collecting)
            and self.config.getoption("backend")
        ):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        folder = self.config.getoption("report")
        if folder is not None and self.runs:
            write_report(folder, self.runs.values())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for run in self.runs.values():
            for result in run.results:
                if result["status"] == "failed":
                    terminalreporter.write_line(broken(result))
            summary = ", ".join(
                f"{count} {status}" for status, count in run.counts.items() if count
            )
            terminalreporter.write_line(f"{run.title}: {summary}")
        if self.runs and (folder := self.config.getoption("report")) is not None:
            terminalreporter.write_line(f"report: {folder / 'index.html'}")
