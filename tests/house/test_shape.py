"""The shape of the library: the sizes of its folders and files, and no circular imports."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

import pytest
from house_rules import ROOMS, ROOT, Room, imports, module_name, room_of, sources

from drivetrain.kernel import optional
from drivetrain.kernel.contract import Driver, Engine, Session

KERNEL_LINES = 2000
"""Most lines of all files in `kernel/` together, so that they can be read in one sitting."""
FILE_LINES = {"kernel/": 300, "": 400}
CALLABLES = 20
"""Most callables that a driver must implement."""
MANDATORY = (Driver, Session, Engine)
OPTIONAL = {
    "ChecksModels": {"check_model"},
    "EstimatesLayout": {"layout"},
    "ListsOptions": {"list_options"},
    "WatchesRanks": {"watch", "abort"},
    "CountsWaits": set(),
    "LeavesRanks": {"leave"},
    "HoldsParts": {"part", "begin_step", "held"},
    "TakesOverStep": {"step"},
    "Audits": {"audit"},
    "AveragesWeights": {"average", "averaged"},
    "ChangesWeights": {"change_weights"},
    "KeepsWrites": {"open_to_writes"},
    "NumbersUpdates": {"number_update"},
    "ShowsUpdates": {"show_update"},
    "RunsBackwardAgain": {"without_update"},
    "GivesBack": {"give_back"},
}
"""Protocols that a driver may offer besides, and their callables, which the limit leaves out."""
LAZY_TABLES = ("runtime/__init__.py", "compat/__init__.py")
"""Packages that load their public names on access."""
COMPAT_FLOORS = (
    {"install"},
    {"trainer"},
    {"integrations"},
    {"parts"},
    {"accelerate"},
    {"checkpoints"},
    {"callbacks", "data"},
    {"common"},
    {"arguments", "evaluation", "optim"},
    {"cuda", "enums", "errors", "logs", "names", "profile", "theirs"},
)
"""Folders and modules of `compat/` from top to bottom. Each imports only from floors below."""
CLI_FLOORS = (
    {"__main__", "app", "gpt", "hf", "pytest_conformance"},
    {"commands"},
    {"jobs", "training"},
    {"data", "process", "report", "settings"},
)
"""The same of `runtime/cli/`."""
FLOORS = {"cli": CLI_FLOORS, "compat": COMPAT_FLOORS}


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
    names = [f"{each.__name__}.{name}" for each in MANDATORY for name in sorted(callables(each))]
    assert len(names) <= CALLABLES, names


def callables(protocol: type) -> set[str]:
    """Return the names of a protocol's own methods."""
    found = vars(protocol).items()
    return {name for name, value in found if inspect.isfunction(value) and name[0] != "_"}


def optional_protocols() -> dict[str, type]:
    """Return the protocols that `isinstance` can ask for, in the order of their file."""
    found = {name: value for name, value in vars(optional).items() if name in optional.__all__}
    return {n: value for n, value in found.items() if getattr(value, "_is_runtime_protocol", False)}


def test_what_a_driver_may_offer_is_listed() -> None:
    found = {name: callables(value) for name, value in optional_protocols().items()}
    assert found == OPTIONAL


def offered(text: str) -> list[str]:
    """Return the protocols of a module that `isinstance` asks a driver, a session or an engine
    for, as their docstrings say.
    """
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and "runtime_checkable" in map(ast.unparse, node.decorator_list)
        and re.match(r"(A|An) (driver|session|engine) ", ast.get_docstring(node) or "")
    ]


def test_what_a_driver_may_offer_lies_in_one_place() -> None:
    above = {path: text for path, text in library().items() if not path.startswith("backends/")}
    found = {path: names for path, text in above.items() if (names := offered(text))}
    assert found == {"kernel/optional.py": list(OPTIONAL)}


def test_the_manual_shows_what_a_driver_may_offer() -> None:
    page = (ROOT / "docs" / "writing-a-driver.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (driver|session|engine) \|", page, re.MULTILINE)
    offered_by = {
        name: str(value.__doc__).split()[1] for name, value in optional_protocols().items()
    }
    assert rows == list(offered_by.items())


def asked_by_name(text: str) -> list[str]:
    """Calls of `getattr` and `hasattr` on a driver, a session or an engine."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("getattr", "hasattr")
        and ast.unparse(node.args[0]).split(".")[-1] in ("driver", "session", "engine")
    ]


def test_what_a_driver_offers_is_asked_by_protocol() -> None:
    found = [f"{path}: {call}" for path, text in library().items() for call in asked_by_name(text)]
    assert not found, "\n".join(found)


def test_asking_by_name_is_seen() -> None:
    assert asked_by_name("if hasattr(self.engine, 'step'):\n    getattr(driver, name)()")
    assert not asked_by_name("hasattr(engine.module, 'step')")


def arrows(files: dict[str, str]) -> dict[str, set[str]]:
    """Return each module's imports of the library, including those inside functions and by name."""
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
    """Return the name by which a module is imported; a package has its folder's name."""
    is_package = PurePosixPath(path).name == "__init__.py"
    name = module_name(path, room)
    return name.rpartition(".")[0] if is_package else name


@cache
def library_arrows() -> dict[str, set[str]]:
    return arrows(library())


def folder_arrows(graph: dict[str, set[str]], room: str) -> dict[str, set[str]]:
    """Return the imports of each folder of a room, and of each module beside the folders."""
    inside = f"drivetrain.{room}."
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        if name.startswith(inside):
            folder = _first(name, inside)
            near = {_first(target, inside) for target in targets if target.startswith(inside)}
            found.setdefault(folder, set()).update(near - {folder})
    return found


def _first(name: str, inside: str) -> str:
    return name.removeprefix(inside).partition(".")[0]


def circle(graph: dict[str, set[str]]) -> str | None:
    """Return a circle in the graph as a text, or None if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return None


def arrows_up(graph: dict[str, set[str]], floors: Sequence[set[str]]) -> list[str]:
    """Return the arrows that do not lead to a lower floor."""
    floor = {name: number for number, names in enumerate(floors) for name in names}
    return [
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in sorted(targets)
        if floor[target] <= floor[name]
    ]


def test_no_arrow_leads_back() -> None:
    assert circle(library_arrows()) is None


def test_an_arrow_that_leads_back_is_seen() -> None:
    by_name = "import importlib\ndef f():\n    importlib.import_module('..data.order', __name__)"
    files = {"runtime/data/order.py": "from ..kernel import errors", "kernel/errors.py": by_name}
    graph = arrows(files)
    assert graph["drivetrain.kernel.errors"] == {"drivetrain.data.order"}
    assert circle(graph)


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - {""}))
def test_folders_of_a_room_have_no_circle(room: str) -> None:
    assert circle(folder_arrows(library_arrows(), room)) is None


@pytest.mark.parametrize("room", FLOORS)
def test_each_folder_of_a_room_imports_from_lower_floors(room: str) -> None:
    graph = folder_arrows(library_arrows(), room)
    assert graph.keys() == set().union(*FLOORS[room])
    assert arrows_up(graph, FLOORS[room]) == []


def test_folders_that_import_each_other_are_seen() -> None:
    files = {
        "compat/data/columns.py": "from ..common.loss import loss_of",
        "compat/data/lengths.py": "",
        "compat/common/loss.py": "",
        "compat/common/metrics.py": "def f():\n    from ..data.lengths import has_length",
    }
    assert circle(arrows(files)) is None
    graph = folder_arrows(arrows(files), "compat")
    assert circle(graph)
    assert arrows_up(graph, COMPAT_FLOORS) == ["common -> data"]


def test_folders_of_one_floor_do_not_import_each_other() -> None:
    assert arrows_up({"data": {"callbacks"}}, COMPAT_FLOORS) == ["data -> callbacks"]
