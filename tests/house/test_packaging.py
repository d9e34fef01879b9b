"""The folders are as pyproject.toml says."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from house_rules import ROOMS, ROOT
from programs import program

if sys.version_info >= (3, 11):
    import tomllib
else:  # goes when Python 3.10 does; mypy brings tomli
    import tomli as tomllib

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PACKAGES = program("packages")


def test_every_folder_is_listed() -> None:
    outside = {name: room.folder for name, room in ROOMS.items() if "runtime/" not in room.folder}
    assert SETUPTOOLS["package-dir"] == {
        f"drivetrain.{name}".rstrip("."): folder for name, folder in outside.items()
    }
    found = PACKAGES.packages(ROOT, SETUPTOOLS["package-dir"])
    assert found == SETUPTOOLS["packages"], "run: python docs/generate.py packages"


def test_a_folder_that_is_not_listed_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kernel" / "new").mkdir(parents=True)
    (tmp_path / "kernel" / "new" / "__init__.py").touch()
    assert PACKAGES.packages(tmp_path, {"a.kernel": "kernel"}) == ["a.kernel.new"]


@pytest.mark.parametrize("folder", SETUPTOOLS["package-dir"].values())
def test_a_package_ships_its_types(folder: str) -> None:
    assert (ROOT / folder / "py.typed").exists()


def test_the_links_for_type_checkers_lead_to_the_folders() -> None:
    links = list((ROOT / ".typing" / "drivetrain").iterdir())
    assert all(link.is_symlink() for link in links), "run: python docs/generate.py packages"
    rooms = {name: ROOT / room.folder for name, room in ROOMS.items() if name}
    modules = {path.name: path for path in (ROOT / "runtime").iterdir() if path.is_file()}
    leading = {link.name: link.resolve() for link in links}
    assert leading == rooms | modules, "run: python docs/generate.py packages"


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="drivetrain")
    assert script.value == "drivetrain.cli:main"
