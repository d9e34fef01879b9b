"""The shape of the library: how large its rooms and files are, and that no arrow leads back."""

from __future__ import annotations

import ast
import inspect
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

import pytest
from house_rules import Room, imports, module_name, room_of, sources

from drivetrain.kernel.contract import Driver, Engine, Session

KERNEL_LINES = 2000
"""Of all files together: what can be read in one sitting."""
FILE_LINES = {"kernel/": 300, "": 400}
CALLABLES = 20
"""That a driver must implement."""
LAZY_TABLES = ("runtime/__init__.py", "compat/__init__.py")
"""Front doors, whose names are loaded when they are asked for."""


def library() -> dict[str, str]:
    return {path: text for path, text in sources().items() if room_of(path)}


def lines(text: str) -> int:
    return len(text.splitlines())


def test_the_kernel_is_read_in_one_sitting() -> None:
    assert sum(lines(text) for text in sources("kernel/").values()) <= KERNEL_LINES


def test_a_file_is_read_in_one_go() -> None:
    found = [
        f"{path} has {lines(text)} lines"
        for path, text in library().items()
        for limit in [next(most for place, most in FILE_LINES.items() if path.startswith(place))]
        if lines(text) > limit
    ]
    assert not found, "\n".join(found)


def test_a_driver_has_few_callables_to_implement() -> None:
    names = [
        f"{contract.__name__}.{name}"
        for contract in (Driver, Session, Engine)
        for name, value in vars(contract).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert len(names) <= CALLABLES, names


def arrows(files: dict[str, str]) -> dict[str, set[str]]:
    """Module -> what it imports of the library, also inside functions and by name."""
    rooms: dict[str, Room] = {path: room for path in files if (room := room_of(path))}
    modules = {module_of(path, room): path for path, room in rooms.items()}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        if path in LAZY_TABLES:
            continue
        for item in imports(path, ast.parse(files[path]), rooms[path]):
            target = item.name if item.name in modules else item.name.rpartition(".")[0]
            if target in modules and target != name:
                found[name].add(target)
    return found


def module_of(path: str, room: Room) -> str:
    """As it is imported: a package by its folder."""
    is_package = PurePosixPath(path).name == "__init__.py"
    name = module_name(path, room)
    return name.rpartition(".")[0] if is_package else name


def test_no_arrow_leads_back() -> None:
    try:
        TopologicalSorter(arrows(library())).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_an_arrow_that_leads_back_is_seen() -> None:
    by_name = "import importlib\ndef f():\n    importlib.import_module('..data.order', __name__)"
    files = {"runtime/data/order.py": "from ..kernel import errors", "kernel/errors.py": by_name}
    graph = arrows(files)
    assert graph["drivetrain.kernel.errors"] == {"drivetrain.data.order"}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()
