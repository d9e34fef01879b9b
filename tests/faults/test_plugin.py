"""The suite as a user runs it: exit codes, and the report that runs share."""

import json
import os
from pathlib import Path

import pytest

from drivetrain.conformance import plugin


def run(*arguments: str) -> int:
    # as in a folder without any configuration of pytest
    suite = ["-c", os.devnull, "-p", "no:cacheprovider", "--pyargs", "drivetrain.conformance"]
    return int(pytest.main([*suite, *arguments], plugins=[plugin]))


def test_report_shows_all_runs_of_a_folder(tmp_path: Path) -> None:
    arguments = ("--backend=faulty", "--nproc=2", f"--report={tmp_path}")
    assert run(*arguments, "-k", "looking_changes_nothing") == 0
    fault = "--backend-set=fault=feeds ahead"
    assert run(*arguments, fault, "-k", "feeds_ahead") == 1
    files = sorted(tmp_path.glob("*.json"))
    statuses = [result["status"] for f in files for result in json.loads(f.read_text())["results"]]
    assert statuses == ["failed", "passed"]
    page = (tmp_path / "index.html").read_text()
    assert "feed pulls 1 batches ahead; declared: 0" in page
    assert "faulty x2 fault=feeds ahead" in page


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
