"""The suite as a user runs it: its exit codes, and the report that several runs share."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.conformance import cases, plugin
from drivetrain.conformance.__main__ import main
from drivetrain.conformance.expected import expected
from drivetrain.conformance.report import Run, write_report


def run(*arguments: str) -> int:
    # as in a folder without any configuration of pytest
    suite = ["-c", os.devnull, "-p", "no:cacheprovider", "--pyargs", "drivetrain.conformance"]
    return int(pytest.main([*suite, *arguments], plugins=[plugin]))


@pytest.mark.slow
def test_report_shows_all_runs_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--backend=faulty", "--nproc=2", f"--report={tmp_path}")
    assert run(*arguments, "-k", "looking_changes_nothing") == 0
    fault = "--backend-set=fault=feeds ahead"
    capsys.readouterr()
    assert run(*arguments, fault, "-k", "feeds_ahead") == 1
    (reported,) = [line for line in capsys.readouterr().out.splitlines() if "FAILED 7_" in line]
    assert "feed pulls 1 batches ahead; declared: 0" in reported
    files = sorted(tmp_path.glob("*.json"))
    statuses = [result["status"] for f in files for result in json.loads(f.read_text())["results"]]
    assert statuses == ["failed", "passed"]
    page = (tmp_path / "index.html").read_text()
    assert "feed pulls 1 batches ahead; declared: 0" in page
    assert "faulty x2 fault=feeds ahead" in page


def test_report_names_which_problem_stood_in_for_which(tmp_path: Path) -> None:
    """Require the stand-in, and the reason of the refusal, in the report."""
    fault = "--backend-set=fault=takes sequences"
    chosen = ("-k", "a_rate_of_zero or recomputed_layers or looking_changes")
    assert run("--backend=faulty", "--nproc=2", f"--report={tmp_path}", fault, *chosen) == 0
    page = (tmp_path / "index.html").read_text()
    assert "In place of regression, which is refused, regression in parts: backend.fault" in page
    (report,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    reported = {
        result["check"]: (result["status"], result["message"]) for result in report["results"]
    }
    assert reported["a_rate_of_zero_moves_nothing"] == ("passed", "")
    status, message = reported["recomputed_layers_count_a_batch_once"]
    assert (status, message.partition(" is set")[0]) == ("refused", "backend.fault")


def test_a_broken_case_is_one_line_with_the_whole_message() -> None:
    result = {
        "law": "1_gradient",
        "check": "ragged",
        "arguments": {"world": "2"},
        "message": "wrong " * 100 + "\nTraceback\n",
    }
    line, more = plugin.broken(result).splitlines()
    assert line == "FAILED 1_gradient ragged world=2: " + "wrong " * 100
    assert more == "    Traceback"


def test_the_time_of_a_run_is_said_with_how_it_is_known(tmp_path: Path) -> None:
    known = cases("cpu", num_processes=1)
    line = expected(known, None)
    assert line.startswith(f"{len(known)} cases of cpu: about ")
    assert "by what cpu x1 took on a machine of " in line
    assert "the drivers that come with drivetrain" in expected(cases("mine"), None)
    write_report(tmp_path, [Run({"backend": "mine", "processes": 1, "options": {}}, {}, [slow()])])
    assert f"50 min when its processes are up, by the report in {tmp_path}" in expected(
        [replace(cases("mine")[0], law="slow")], tmp_path
    )


def slow() -> dict[str, Any]:
    words = {"law": "slow", "check": "x", "arguments": {}, "status": "passed", "message": ""}
    return {**words, "seconds": 3000.0}


def test_help_is_that_of_the_suite(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["suite", "--help"])
    assert main() == 0
    reported = capsys.readouterr().out
    assert len(reported.splitlines()) < 40
    assert all(option in reported for option in (*plugin.OPTIONS, "examples:"))


def test_a_run_in_which_nothing_ran_is_red() -> None:
    assert run("--backend=faulty", "-k", "no_such_law") != 0


def test_unavailable_driver_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend=unavailable", "--nproc=2") == plugin.EXIT_UNAVAILABLE
    assert "no unobtainium here; install it with: pip install" in capsys.readouterr().out


def test_unavailable_driver_can_be_excused(tmp_path: Path) -> None:
    arguments = ("--nproc=2", "--allow-unavailable", f"--report={tmp_path}", "-k", "3_not")
    assert run("--backend=unavailable", *arguments) == 0
    (report,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert {result["status"] for result in report["results"]} == {"unavailable"}
    assert "no unobtainium" in report["results"][0]["message"]


def test_unknown_driver_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend=no-such-driver") == pytest.ExitCode.USAGE_ERROR
    assert "no-such-driver" in capsys.readouterr().err
