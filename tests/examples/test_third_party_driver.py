"""The example of a driver's package, in an environment of its own, where only its entry point
tells drivetrain about it."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "third_party_driver"
MAX_LINES = 160
"""Of code: an example that is longer is not read."""


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package beside an environment `venv` in which it is installed.

    The environment finds torch, drivetrain and the build tools in the present one, so that nothing
    is downloaded. It is made with uv, or with Python's own venv and pip where there is no uv.
    """
    folder = tmp_path_factory.mktemp("third_party") / "package"
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    home = folder / "venv"
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        made = run(uv, "venv", "--python", sys.executable, home, folder=folder)
        assert made.returncode == 0, made.stderr
        install = [uv, "pip", "install", "--python", home / "bin" / "python"]
    else:
        venv.create(home, with_pip=True)
        install = [home / "bin" / "python", "-m", "pip", "install"]
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    # a .pth file alone would not read the .pth files there, which editable installs live by
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    Path(paths["purelib"], "present.pth").write_text("".join(lines))
    # these two flags: only the package itself is installed, with the tools that are there
    done = run(*install, "--no-deps", "--no-build-isolation", ".", folder=folder)
    assert done.returncode == 0, done.stderr
    for part in ("drivetrain_sum64", "drivetrain_sum64.egg-info", "build"):
        shutil.rmtree(folder / part, ignore_errors=True)  # what is found now is what is installed
    return folder


def test_it_is_listed(package: Path) -> None:
    done = run("venv/bin/python", "-m", "drivetrain.cli", "backends", "--json", folder=package)
    assert done.returncode == 0, done.stderr
    records = {record["name"]: record for record in json.loads(done.stdout)}
    assert records["sum64"]["usable"]
    assert records["sum64"]["capabilities"]["precisions"] == ["fp32"]
    here = run(sys.executable, "-m", "drivetrain.cli", "backends", "--json", folder=package)
    assert "sum64" not in here.stdout, "it leaked into the present environment"


def test_it_keeps_the_first_law(package: Path) -> None:
    done = run("venv/bin/python", "-m", "pytest", "-q", "-k", "1_gradient", folder=package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_passes_the_suite(package: Path) -> None:
    done = run("venv/bin/python", "-m", "pytest", "-q", folder=package)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "skipped" not in done.stdout


def test_it_adds_up_in_float64(package: Path) -> None:
    """Its one idea: 2**24 + 1 is no float32, and 16 times 1 on top of it are not lost."""
    script = """
import torch
from drivetrain.kernel.contract import Plan, Recipe
from drivetrain.kernel.registry import find_driver

recipe = Recipe(
    model=lambda: torch.nn.Linear(1, 1, bias=False),
    loss=None,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
)
for name in ("sum64", "cpu"):
    with find_driver(name).open(Plan()) as session:
        engine = session.prepare(recipe)
        for slope in (2.0**24, *[1.0] * 16):
            engine.backward(engine.module(torch.full((1, 1), slope)).sum())
        print(int(engine.update().grad_norm))
"""
    done = run("venv/bin/python", "-c", script, folder=package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(2**24 + 16), str(2**24)]


def test_it_is_short() -> None:
    text = (SOURCE / "drivetrain_sum64" / "__init__.py").read_text()
    lines = [line.strip() for line in text.splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= MAX_LINES
