"""The examples of driver packages. Each is installed into its own environment, where drivetrain
finds it by its entry point alone.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
MANUAL = (ROOT / "docs" / "writing-a-driver.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


@dataclass(frozen=True)
class Example:
    """A package in `examples`, and the checks that it must pass."""

    folder: str
    backend: str
    num_processes: int
    laws: str
    """Laws that always run, as an expression for `-k`; the slow tests run all of them."""
    max_lines: int
    """Largest number of lines of its driver. Readers skip a longer example."""

    def __str__(self) -> str:
        return self.backend

    @property
    def source(self) -> Path:
        return ROOT / "examples" / self.folder

    @property
    def module(self) -> str:
        return f"drivetrain_{self.backend}"


SUM64 = Example("third_party_driver", "sum64", 1, "plain_sgd and regression", 80)
BY_HAND = Example(
    "gloo_driver",
    "by_hand",
    2,
    "plain_sgd and regression or 1_absent or 6_buffers or tell_each_other or follow_each_other",
    150,
)
READ_BESIDE = ("single_process", "plain_engine", "stepping")
EXAMPLES = pytest.mark.parametrize(
    "package", [SUM64, pytest.param(BY_HAND, marks=pytest.mark.slow)], indirect=True, ids=str
)


class Package(NamedTuple):
    example: Example
    folder: Path


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
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Install a copy of an example into an environment `venv` beside it.

    The environment finds torch, drivetrain and the build tools in the present one, so that nothing
    is downloaded. It is made by uv, or by Python's own venv and pip if there is no uv.
    """
    example: Example = request.param
    folder = tmp_path_factory.mktemp(example.backend) / "package"
    built = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(example.source, folder, ignore=built)
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
    for part in (example.module, f"{example.module}.egg-info", "build"):
        shutil.rmtree(folder / part, ignore_errors=True)  # what is found now is what is installed
    script = home / "bin" / "drivetrain"  # as installing drivetrain there would have made it
    script.write_text(f"#!{home / 'bin' / 'python'}\nfrom drivetrain.cli import main\n\nmain()\n")
    script.chmod(0o755)
    return Package(example, folder)


@functools.cache
def listed_here() -> str:
    done = run(sys.executable, "-m", "drivetrain.cli", "backends", "--json", folder=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@EXAMPLES
def test_it_is_listed(package: Package) -> None:
    example, folder = package
    done = run("venv/bin/python", "-m", "drivetrain.cli", "backends", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    records = {record["name"]: record for record in json.loads(done.stdout)}
    record = records[example.backend]
    assert record["usable"]
    assert record["capabilities"]["precisions"] == ["fp32"]
    assert record["capabilities"]["multi_process"] == (example.num_processes > 1)
    assert example.backend not in listed_here(), "it leaked into the present environment"


@EXAMPLES
def test_it_keeps_a_few_laws(package: Package) -> None:
    prove(package, "-k", package.example.laws)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", [BY_HAND], indirect=True, ids=str)
@pytest.mark.parametrize("num_processes", [2, 3])
def test_it_keeps_all_laws(package: Package, num_processes: int) -> None:
    """Prove the laws on several processes. The manual's commands prove them on one."""
    prove(package, "--nproc", str(num_processes))


def prove(package: Package, *options: str) -> None:
    """Run the suite as the manual describes."""
    suite = ("-m", "drivetrain.conformance", "--backend", package.example.backend)
    done = run("venv/bin/python", *suite, *options, folder=package.folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert " passed" in done.stdout
    assert "unavailable" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", [SUM64], indirect=True, ids=str)
@pytest.mark.parametrize("command", COMMANDS[1:])
def test_the_manual_s_commands(package: Package, command: str) -> None:
    """Run the manual's commands, including the whole suite."""
    programs = package.folder / "venv/bin"
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=package.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "sum64" in done.stdout or " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_manual_shows_what_is_there() -> None:
    """Require that the manual's first command installs the package above, and its Python is in the
    files.
    """
    assert COMMANDS[0] == "pip install ."
    common = (ROOT / "backends" / "common" / f"{name}.py" for name in READ_BESIDE)
    theirs = SUM64.source / "tests" / "test_sum64.py"
    there = [path.read_text() for path in (ROOT / "backends" / "cpu.py", *common, theirs)]
    blocks = re.findall(r"^```python\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 3
    for block in blocks:
        assert any(block in text for text in there), block
    toml = re.findall(r"^```toml\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE)
    assert toml and all(block in (SUM64.source / "pyproject.toml").read_text() for block in toml)


def test_the_manual_s_links_lead_somewhere() -> None:
    """Require that links lead to existing files or folders, and that their texts match files'
    names.
    """
    links = re.findall(r"\[([^]]+)\]\((\.\./[^)]+)\)", MANUAL)
    assert len(links) > 20
    for words, target in links:
        path = ROOT / "docs" / target
        assert path.exists(), target
        if words.endswith(".py"):
            assert path.as_posix().endswith(words), (words, target)
    for example in (SUM64, BY_HAND):
        assert ("examples/" + example.folder, f"../examples/{example.folder}") in links


@pytest.mark.slow
@pytest.mark.parametrize("package", [SUM64], indirect=True, ids=str)
def test_it_adds_up_in_float64(package: Package) -> None:
    """Add 16 times 1 to 2**24. float32 would lose these ones; float64 is the driver's one idea."""
    script = """
import torch
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.recipe import Recipe
from drivetrain.registry import find_driver

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
    done = run("venv/bin/python", "-c", script, folder=package.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(2**24 + 16), str(2**24)]


@pytest.mark.parametrize("example", [SUM64, BY_HAND], ids=str)
def test_it_is_short(example: Example) -> None:
    """Require at most the number of lines that the manual names."""
    text = (example.source / example.module / "__init__.py").read_text()
    assert len(text.splitlines()) <= example.max_lines
    described = MANUAL.partition(f"(../examples/{example.folder})")[2]
    assert described.partition(" lines")[0].endswith(f"at most {example.max_lines}")


@pytest.mark.parametrize("example", [SUM64, BY_HAND], ids=str)
def test_it_is_made_from_public_names(example: Example) -> None:
    """Require that imports from drivetrain are of the kernel or of drivers' common parts."""
    tree = ast.parse((example.source / example.module / "__init__.py").read_text())
    names = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and "drivetrain" in node.module
    }
    assert names
    for name in names:
        assert name.startswith(("drivetrain.kernel.", "drivetrain.backends.common")), name
