"""Prove all drivers but `xpu`, and write the results to docs/conformance: a page over drivers and
laws, the matrix of who resumes whom, the matrix of layouts, and the losses of meshes beside those
of one process.

    python docs/conformance.py [WORD ...]
    python docs/conformance.py --pages       the pages alone, from the figures that are there

A word selects the worlds whose name contains it, such as `xla` or `ddp:2`. Without words, all are
run. `matrix` is the matrix of drivers, `layouts` the matrix of all layouts of a model, and `meshes`
the losses of each mesh. All together take about an hour on two cores. They run in an environment
that holds all these drivers; uv makes it on the first run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from drivetrain.conformance.expected import MEASURED, summed_up
from drivetrain.conformance.matrix import read_table, write_page
from drivetrain.conformance.report import write_report

ROOT = Path(__file__).parents[1]
FOLDER = Path("docs/conformance")

sys.path.append(str(ROOT / "tests" / "backends"))

from environments import WORLDS, build_all, python_of_all  # noqa: E402 - where the tests keep it

DIMENSIONS = ("replicate", "shard", "context", "tensor", "expert", "pipeline")
TOGETHER = ("mesh:2,tensor=2,expert=2", "mesh:4,pipeline=2,tensor=2")
MESHES = (*(f"mesh:2,{name}=2" for name in DIMENSIONS), *TOGETHER)
"""Proved on the newest torch, which pipelines need: each dimension alone, and two together."""


def commands() -> dict[str, list[str]]:
    """Commands to run, by their key: the matrices, the meshes, and the suite in all worlds of up to
    two processes.
    """
    report = ["--report", str(FOLDER)]
    programs = ROOT / "tests" / "backends"
    matrix = [python_of_all(), "-m", "drivetrain.conformance.matrix", *report, *WORLDS]
    return {
        "matrix": matrix,
        "layouts": [sys.executable, str(programs / "layouts.py"), str(FOLDER)],
        "meshes": [sys.executable, str(programs / "meshes.py"), str(FOLDER / "meshes.md")],
        **{
            world: [python_of_all(), *suite(world), *report]
            for world in WORLDS
            if ":3" not in world
        },
        **{world: [sys.executable, *suite(world), *report] for world in MESHES},
    }


def suite(world: str) -> list[str]:
    """Arguments for Python that run the suite on a world `NAME[:PROCESSES][,OPTION=VALUE]`."""
    driver, *options = world.split(",")
    name, _, processes = driver.partition(":")
    command = ["-m", "drivetrain.conformance", "--backend", name, "-q", "-n0"]
    command += ["--nproc", processes or "1"]
    return command + [word for option in options for word in ("--backend-set", option)]


def write_measured() -> None:
    """Record the measured seconds, from which a run of the suite predicts its own length."""
    reports = [json.loads(path.read_text()) for path in sorted((ROOT / FOLDER).glob("*.json"))]
    measured = {"machine": f"a machine of {os.cpu_count()} CPUs", "seconds": summed_up(reports)}
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")


def write_pages() -> None:
    """Write the pages over laws, matrices and layouts for the recorded figures."""
    write_report(ROOT / FOLDER, [])
    for name in ("matrix", "layouts"):
        write_page(ROOT / FOLDER, read_table(ROOT / FOLDER / f"{name}.csv"), name)


def main(words: list[str]) -> int:
    """Run those in which a word occurs; the number that failed."""
    if words == ["--pages"]:
        write_pages()
        return 0
    build_all()
    chosen = {k: c for k, c in commands().items() if not words or any(w in k for w in words)}
    if not chosen:
        print(f"none of {words} occurs in: {'; '.join(commands())}")
        return 2
    failed = []
    for key, command in chosen.items():
        print(f"--- {key}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(key)
    write_measured()
    print(f"failed: {'; '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
