"""Tries drivetrain on other Pythons, and writes docs/compatibility.json and docs/compatibility.md.

    python docs/compatibility.py [3.10 3.12 ...]     by default all that pyproject.toml allows
    python docs/compatibility.py --page              the page alone, from the record

For each Python, uv makes two environments: one with the newest torch that there is for it, and one
with the older torch that holds all drivers. In each, every driver is asked whether it runs, and
those that run are put to law 2 of the suite (the norm of the gradient): `cpu` to all of it, the
others to one check. The Pythons that are not named, or cannot be had, keep what the record holds.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).with_suffix(".md")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

sys.path.append(str(ROOT / "tests" / "backends"))

from environments import OPTIONS_OF_ALL  # noqa: E402 - where the tests keep it

ENVIRONMENTS = {
    "newest torch": ["--extra=deepspeed"],
    # `uv run` knows no --no-install-package: it installs what `uv sync` leaves out, and is slower
    "all drivers": [word for word in OPTIONS_OF_ALL if not word.startswith("--no-install")],
}
PROCESSES = {"ddp": 2, "fsdp": 2, "mesh": 2}
"""Number of processes by driver; other drivers run in one."""

Entry = dict[str, Any]


def tried(python: str, options: list[str]) -> Entry:
    """Return the results of an environment with this Python, or the error that kept it from being
    made.
    """
    command = ["uv", "run", "--isolated", "--quiet", "--python", python, *options]
    command += [
        "--with",
        "pytest",
        "--with",
        "pytest-timeout",
        "python",
        str(Path(__file__)),
        "--here",
    ]
    started = time.strftime("%Y-%m-%d", time.gmtime())
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    done = subprocess.run(  # uv brings the Python, where it can be reached
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"date": started, "error": last, "drivers": {}}
    answer: Entry = json.loads(done.stdout.splitlines()[-1])
    return {"date": started, **answer}


def here() -> Entry:
    """Return the results of the environment that this runs in."""
    import torch

    from drivetrain.cli.report.backends import backend_records

    drivers = {record["name"]: record for record in backend_records()}
    return {
        "version": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "drivers": {name: verdict(name, record) for name, record in drivers.items()},
    }


def verdict(name: str, record: Entry) -> str:
    """Return the table's cell for a driver in this environment."""
    if not record["usable"]:
        return "not here"
    command = [sys.executable, "-m", "drivetrain.conformance", "--backend", name, "-q"]
    chosen = "2_norm" if name == "cpu" else "clipping_limits_the_update"
    command += ["--nproc", str(PROCESSES.get(name, 1)), "-k", chosen, "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = re.findall(r"(\d+) (passed|failed|errors?)", done.stdout)
    counts = {kind.removesuffix("s"): int(number) for number, kind in found}
    if done.returncode or not counts.get("passed"):
        return f"fails ({counts.get('failed', 0) + counts.get('error', 0)} checks)"
    return "law 2: kept"


def page(record: dict[str, dict[str, Entry]]) -> str:
    """The text of docs/compatibility.md."""
    entries = {
        (python, kind): record.get(python, {}).get(kind, {"drivers": {}})
        for python in PYTHONS
        for kind in ENVIRONMENTS
    }
    names = list(dict.fromkeys(name for entry in entries.values() for name in entry["drivers"]))
    lines = [
        "# Compatibility",
        "",
        "Written by `python docs/compatibility.py` from what it tried, which it keeps in",
        "[compatibility.json](compatibility.json). On each Python, with the newest torch there is",
        "for it and with the older one that all drivers have, the drivers that run are put to law",
        "2 of the suite, `cpu` to all of it; *not here* are those whose hardware or library was",
        "not there. What all of them keep of the other laws stands in",
        "[the report of the suite](conformance/index.html). A row that was never tried says so:",
        "where the Python can be had, `python docs/compatibility.py 3.12` fills it.",
        "",
        f"| Python | torch | tried | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for (python, kind), entry in entries.items():
        cells = [entry["drivers"].get(name, "not tried") for name in names]
        shown = [entry.get("version", python), entry.get("torch", kind), entry.get("date", "never")]
        lines.append(f"| {' | '.join([*shown, *cells])} |")
    failed = {names: entry["error"] for names, entry in entries.items() if "error" in entry}
    lines += ["", *(f"Python {python}, {kind}: {why}" for (python, kind), why in failed.items())]
    return "\n".join(lines).rstrip() + "\n"


def main(words: list[str]) -> None:
    """See the module's docstring."""
    if words == ["--here"]:
        print(json.dumps(here()))
        return
    record: dict[str, dict[str, Entry]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for python in [] if words == ["--page"] else words or PYTHONS:
        for kind, options in ENVIRONMENTS.items():
            found = tried(python, options)
            print(f"Python {python}, {kind}: {found}", flush=True)
            kept = record.setdefault(python, {})
            kept[kind] = kept[kind] if "error" in found and kind in kept else found
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    PAGE.write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
