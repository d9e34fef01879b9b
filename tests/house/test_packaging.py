"""The folders are as pyproject.toml says."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from house_rules import ROOMS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # goes when Python 3.10 does; mypy brings tomli
    import tomli as tomllib

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def packages_below(folder: Path, name: str) -> set[str]:
    """Return the dotted names of a folder and all folders in it that hold an `__init__.py`."""
    inits = [path.parent for path in folder.rglob("__init__.py")]
    return {".".join((name, *path.relative_to(folder).parts)) for path in inits}


def test_every_folder_is_listed() -> None:
    outside = {name: room.folder for name, room in ROOMS.items() if "runtime/" not in room.folder}
    assert SETUPTOOLS["package-dir"] == {
        f"drivetrain.{name}".rstrip("."): folder for name, folder in outside.items()
    }
    found: set[str] = set()
    for name, folder in SETUPTOOLS["package-dir"].items():
        found |= packages_below(ROOT / folder, name)
    assert sorted(found) == sorted(SETUPTOOLS["packages"])


def test_a_folder_that_is_not_listed_is_seen(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "__init__.py").touch()
    assert packages_below(tmp_path, "drivetrain.kernel") == {"drivetrain.kernel.new"}


@pytest.mark.parametrize("folder", SETUPTOOLS["package-dir"].values())
def test_a_package_ships_its_types(folder: str) -> None:
    assert (ROOT / folder / "py.typed").exists()


def test_the_links_for_type_checkers_lead_to_the_folders() -> None:
    links = ROOT / ".typing" / "drivetrain"
    leading = {link.name: link.resolve() for link in links.iterdir()}
    rooms = {name: ROOT / room.folder for name, room in ROOMS.items() if name}
    modules = {path.name: path for path in (ROOT / "runtime").iterdir() if path.is_file()}
    assert leading == rooms | modules


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="drivetrain")
    assert script.value == "drivetrain.cli:main"
