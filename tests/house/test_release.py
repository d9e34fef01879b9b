"""The release: its version, files and types, and its table of supported platforms."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from house_rules import ROOT
from programs import program
from test_packaging import PYPROJECT, SETUPTOOLS

from drivetrain import compat

VERSION = PYPROJECT["project"]["version"]
TYPED = (
    "drivetrain",
    "drivetrain.backends.common.plain_engine",
    "drivetrain.backends.common.single_process",
    "drivetrain.checkpoint",
    "drivetrain.compat",
    "drivetrain.conformance",
    "drivetrain.kernel.contract",
    "drivetrain.kernel.errors",
    "drivetrain.kernel.events",
    "drivetrain.kernel.optional",
    "drivetrain.kernel.plan",
    "drivetrain.kernel.recipe",
    "drivetrain.kernel.shards",
    "drivetrain.planning",
    "drivetrain.registry",
    "drivetrain.symbolic",
    "drivetrain.trackers",
)
"""Modules whose public names users import."""


def run(*command: str, folder: Path) -> str:
    """Return the output of a command, which must not fail."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_version_is_one() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    (unreleased, (newest, date), *_) = headings
    assert unreleased == ("Unreleased", "")
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {newest}\n" in cited and f"\ndate-released: {date}\n" in cited
    assert VERSION in (newest, f"{VERSION.partition('.dev')[0]}.dev0")


def test_the_table_of_what_it_runs_on_is_its_record() -> None:
    compatibility = program("compatibility")
    record = json.loads(compatibility.RECORD.read_text())
    about = "run: python docs/generate.py compatibility-page"
    assert compatibility.PAGE.read_text() == compatibility.page(record), about
    allowed = re.findall(
        r"Python :: (3\.\d+)$", "\n".join(PYPROJECT["project"]["classifiers"]), re.M
    )
    assert tuple(allowed) == compatibility.PYTHONS
    entries = [entry for of_python in record.values() for entry in of_python.values()]
    assert not [name for entry in entries for name in entry["drivers"].values() if "fail" in name]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it builds an environment, and tries each driver there
@pytest.mark.parametrize("kind", program("compatibility").ENVIRONMENTS)
def test_this_python_is_as_the_record_says(kind: str) -> None:
    compatibility = program("compatibility")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    recorded = json.loads(compatibility.RECORD.read_text())[python]
    found = compatibility.tried(python, compatibility.ENVIRONMENTS[kind])
    about = f"run: python docs/compatibility.py {python}"
    assert found["drivers"] == recorded[kind]["drivers"], about


def uses(module: str) -> str:
    """Return a user's file that uses each public name of a module."""
    found = importlib.import_module(module)
    own = [
        name for name, value in vars(found).items() if getattr(value, "__module__", "") == module
    ]
    names = getattr(found, "__all__", [name for name in own if not name.startswith("_")])
    alias = module.replace(".", "_")
    lines = [f"import {module} as {alias}"]
    lines += [f"reveal_type({alias}.{name})" for name in names]
    return "\n".join(lines) + "\n"


A_USER_S_FILE = """
import torch
from drivetrain import Recipe, Result, Settings, evaluate, fit, predict
from drivetrain.kernel.events import Event, Logged, Request

def loss(module: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.as_tensor(module(batch[0])).sum()

def observe(event: Event) -> Request | None:
    return Request.STOP if isinstance(event, Logged) and event.loss < 1 else None

recipe = Recipe(model=lambda: torch.nn.Linear(1, 1), loss=loss, train_data=[torch.ones(1)])
result = fit(recipe, Settings(steps=3), backend="cpu", observers=[observe])
assert_type(result, Result)
assert_type(result.loss, float)
assert_type(evaluate(recipe), dict[str, dict[str, float]])
"""
OF_TRANSFORMERS = [name for name, home in compat._HOMES.items() if home.startswith("transformers.")]
ANY_ON_PURPOSE = {f"reveal_type(drivetrain_compat.{name})" for name in OF_TRANSFORMERS} | {
    "reveal_type(drivetrain_kernel_recipe.Batch)"
}
"""Names of type Any: `Batch`, and those that compat passes on from transformers, which may not be
installed.
"""
MISUSES = """
from drivetrain import Recipe, Settings, fit
Settings(steps="three")
fit(3)
Recipe(model=3, loss=4)
"""


@pytest.mark.slow
def test_a_user_s_file_is_checked_strictly(tmp_path: Path) -> None:
    """Require that every public name has a type other than Any, and that wrong uses are found."""
    file, wrong = tmp_path / "user.py", tmp_path / "wrong.py"
    head = "from typing_extensions import assert_type\n"
    file.write_text(head + "".join(map(uses, TYPED)) + A_USER_S_FILE)
    wrong.write_text(MISUSES)
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nmypy_path = {ROOT / '.typing'}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(settings)]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "of-a-user")]
    printed = run(*command, str(file), folder=tmp_path)
    assert "no issues found" in printed
    shown = re.findall(r"user\.py:(\d+): note: Revealed type is \"(.*)\"", printed)
    lines = file.read_text().splitlines()
    untyped = {lines[int(number) - 1] for number, type_ in shown if type_ == "Any"}
    assert len(shown) > 200
    assert untyped == ANY_ON_PURPOSE
    done = subprocess.run(
        [*command, str(wrong)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    refused = {int(line) for line in re.findall(r"wrong\.py:(\d+): error", done.stdout)}
    assert refused == {3, 4, 5}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_released_installs_and_trains(kind: str, tmp_path: Path) -> None:
    """Build the release, install it into an environment that does not see this checkout, and use it
    there.
    """
    run("uv", "build", f"--{kind}", "--out-dir", str(tmp_path / "dist"), str(ROOT), folder=tmp_path)
    (built,) = (path for path in (tmp_path / "dist").iterdir() if path.suffix in (".whl", ".gz"))
    assert VERSION in built.name
    if kind == "wheel":
        names = zipfile.ZipFile(built).namelist()
    else:
        with tarfile.open(built) as archive:
            names = archive.getnames()
    assert not [name for name in names if "__pycache__" in name or ".venv" in name]
    if kind == "wheel":
        folders = {str(Path(name).parent).replace("/", ".") for name in names}
        assert set(SETUPTOOLS["packages"]) <= folders
    environment = tmp_path / "clean"
    python = str(environment / "bin" / "python")
    run("uv", "venv", "--quiet", "--python", sys.executable, str(environment), folder=tmp_path)
    wanted = [str(built), "pytest", "pytest-timeout"]
    run("uv", "pip", "install", "--quiet", "--python", python, *wanted, folder=tmp_path)
    train = ["train", "--backend", "cpu", "--steps", "3", "--out", "run"]
    small = ["--set", "recipe.width=16", "--set", "recipe.layers=1", "--set", "recipe.heads=1"]
    run(str(environment / "bin" / "drivetrain"), *train, *small, folder=tmp_path)
    assert (tmp_path / "run" / "report.html").is_file()
    suite = ["-m", "drivetrain.conformance", "--backend", "cpu", "-k", "2_norm"]
    assert " passed" in run(python, *suite, folder=tmp_path)
    shown = run(
        python,
        "-c",
        "import drivetrain; print(drivetrain.__version__, drivetrain.__file__)",
        folder=tmp_path,
    )
    assert shown.startswith(f"{VERSION} {environment}")
