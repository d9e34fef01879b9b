"""Suites of a few tests, run by two workers in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from house_rules import ROOT

COMMAND = (sys.executable, "-m", "pytest")
OPTIONS = ("-n=2", "--dist=loadfile", "-p", "no:cacheprovider")


def write(folder: Path, suite: dict[str, str], plugin: str = "second_look") -> None:
    """Write a suite that is tested with one of the plugins of this project's tests."""
    (folder / "conftest.py").write_text(f'pytest_plugins = ["{plugin}"]\n')
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in suite.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def run(
    folder: Path, suite: dict[str, str], *options: str, plugin: str = "second_look"
) -> tuple[int, str]:
    """Write a suite, run it by two workers, and return its exit status and what it printed."""
    write(folder, suite, plugin)
    done = subprocess.run(
        [*COMMAND, *OPTIONS, *options],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def environment() -> dict[str, str]:
    """Return this process' environment with no plugin but the one that starts workers."""
    kept = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    kept["PYTHONPATH"] = str(ROOT / "tests")
    return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}


def last_line(printed: str) -> str:
    return re.sub(r" in [\d.]+s.*", "", printed.splitlines()[-1]).strip("= ")
