"""What pyproject.toml says about the folders is true."""

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
    """The dotted names of a folder and all folders in it that hold an `__init__.py`."""
    inits = [path.parent for path in folder.rglob("__init__.py")]
    return {".".join((name, *path.relative_to(folder).parts)) for path in inits}


def test_every_folder_is_listed() -> None:
    assert SETUPTOOLS["package-dir"] == {
        f"drivetrain.{name}": room.folder for name, room in ROOMS.items()
    }
    found: set[str] = set()
    for name, folder in SETUPTOOLS["package-dir"].items():
        found |= packages_below(ROOT / folder, name)
    assert sorted(found) == sorted(SETUPTOOLS["packages"])


def test_a_folder_that_is_not_listed_is_seen(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "__init__.py").touch()
    assert packages_below(tmp_path, "drivetrain.kernel") == {"drivetrain.kernel.new"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_ships_its_types(room: str) -> None:
    assert (ROOT / ROOMS[room].folder / "py.typed").exists()


def test_the_links_for_type_checkers_lead_to_the_folders() -> None:
    links = ROOT / ".typing" / "drivetrain"
    assert {link.name for link in links.iterdir()} == set(ROOMS)
    for name, room in ROOMS.items():
        assert (links / name).resolve() == ROOT / room.folder


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="drivetrain")
    assert script.value == "drivetrain.cli:main"
