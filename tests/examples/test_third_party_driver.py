"""The example of a driver's package, in an environment of its own, where only its entry point
tells drivetrain about it."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "third_party_driver"
MANUAL = (ROOT / "docs" / "writing-a-driver.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
MAX_LINES = 170
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
        # before Python 3.12 an old one is there, which would hide the present one
        run(home / "bin" / "python", "-m", "pip", "uninstall", "-y", "setuptools", folder=folder)
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    # a .pth file alone would not read the .pth files there, which editable installs live by
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    Path(paths["purelib"], "present.pth").write_text("".join(lines))
    # these two flags: only the package itself is installed, with the tools that are there
    done = run(*install, "--no-deps", "--no-build-isolation", ".", folder=folder)
    assert done.returncode == 0, done.stderr
    for part in ("drivetrain_sum64", "drivetrain_sum64.egg-info", "build"):
        shutil.rmtree(folder / part, ignore_errors=True)  # what is found now is what is installed
    script = home / "bin" / "drivetrain"  # as installing drivetrain there would have made it
    script.write_text(f"#!{home / 'bin' / 'python'}\nfrom drivetrain.cli import main\n\nmain()\n")
    script.chmod(0o755)
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
    done = run(
        "venv/bin/python", "-m", "pytest", "-q", "-k", "plain_sgd and regression", folder=package
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", COMMANDS[1:])
def test_the_manual_s_commands(package: Path, command: str) -> None:
    """Among them the whole suite."""
    environment = {**os.environ, "PATH": f"{package / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=package,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "sum64" in done.stdout or " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_manual_shows_what_is_there() -> None:
    """Its first command is how the package above is installed; its Python stands in the files."""
    assert COMMANDS[0] == "pip install ."
    backends, theirs = ROOT / "backends", SOURCE / "tests" / "test_sum64.py"
    files = *(backends / name for name in ("cpu.py", "_alone.py", "_step.py")), theirs
    there = [path.read_text() for path in files]
    blocks = re.findall(r"^```python\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 3
    for block in blocks:
        assert any(block in text for text in there), block
    toml = re.findall(r"^```toml\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    assert toml and all(block in (SOURCE / "pyproject.toml").read_text() for block in toml)


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
            loss = engine.module(torch.full((1, 1), slope)).sum()
            engine.backward(loss, torch.ones(()))
        print(int(engine.update().grad_norm))
"""
    done = run("venv/bin/python", "-c", script, folder=package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(2**24 + 16), str(2**24)]


def test_it_is_short() -> None:
    text = (SOURCE / "drivetrain_sum64" / "__init__.py").read_text()
    lines = [line.strip() for line in text.splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) <= MAX_LINES
