"""Finds the private names of other libraries that the library's sources use.

A use is a name that begins with an underscore: imported, reached as an attribute, given as a
keyword, or written as a string; and the name of an autograd node as a string. A name is the
project's own if a file of the same room binds it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from house_rules import room_of

__all__ = ["Use", "at_import", "own_names", "uses"]

DOCUMENTED = frozenset({"_current_frames", "_exit", "_fields", "_getframe", "_replace"})
"""Names that Python documents, of `os`, `sys` and named tuples."""
PARTS_OF_WORDS = frozenset({"_layerwise", "_mem_", "_runtime", "_token"})
"""Strings that are looked for in names of settings and metrics, which are public."""
PRIVATE = re.compile(r"_(?!_.*__$)[\w*]*[a-zA-Z][\w*]*")
NODE = re.compile(r"\w*Backward\d*|(torch::autograd::)?AccumulateGrad")
NAMES = re.compile(r"[\w*]+([.:][\w*]+)*")


@dataclass(frozen=True)
class Use:
    """A private name, as far as the source shows whose it is."""

    path: str
    line: int
    name: str
    """`torch._C.x` of a module or what is imported from it; `_x` of any other object."""

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def is_private(name: str) -> bool:
    return bool(PRIVATE.fullmatch(name)) and name not in DOCUMENTED | PARTS_OF_WORDS


def bound(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines. An attribute counts if it is set on `self` or
    `cls`, or annotated in a class."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def uses(path: str, text: str, own: Collection[str], listed: Collection[str] = ()) -> list[Use]:
    """Return the uses in a file. `own`: names that its room binds. Among these, `listed` ones are
    another library's on all objects but `self` and `cls`.
    """
    tree = ast.parse(text, path)
    modules, own_texts = _imported(tree), set(own) - set(listed)
    chained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    other_texts = set(map(id, _docstrings(tree)))
    other_texts |= {id(part) for each in _f_strings(tree) for part in each.values}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import() | ast.ImportFrom(level=0):
                names = [name for name in _names(node) if any(map(is_private, name.split(".")))]
            case ast.Attribute() if id(node) not in chained:
                names = list(_of_chain(node, modules, own, listed))
            case ast.keyword(arg=str(name)) if is_private(name) and name not in own:
                names = [name]
            case ast.Constant(value=str(name)) if id(node) not in other_texts:
                names = list(_of_text(name, own_texts))
            case ast.JoinedStr():
                names = list(_of_text(_pattern(node), own_texts))
        found += [Use(path, getattr(node, "lineno", 0), name) for name in names]
    return found


def at_import(path: str, text: str) -> list[Use]:
    """Return the private names that are looked up when the file is imported, so that an import ends
    if a library renames one."""
    tree = ast.parse(text, path)
    modules = _imported(tree)
    found = []
    for node in _outside_functions(tree):
        names: list[str] = []
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            names = [name for name in _names(node) if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            names = [name for name in [_whole(node, modules)] if name]
        found += [Use(path, node.lineno, name) for name in names]
    return found


def _outside_functions(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.stmt | ast.expr):
            yield child
        yield from _outside_functions(child)


def _f_strings(tree: ast.Module) -> Iterator[ast.JoinedStr]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    return [name for name in names if name.partition(".")[0] not in ("__future__", "drivetrain")]


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name in the file -> what it is of another library."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _whole(node: ast.expr, modules: Mapping[str, str]) -> str:
    """Return `torch._C.x` for a chain of attributes on what is imported; else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in modules:
        return ""
    return ".".join([modules[node.id], *reversed(parts)])


def _of_chain(
    node: ast.Attribute, modules: Mapping[str, str], own: Collection[str], listed: Collection[str]
) -> Iterator[str]:
    if whole := _whole(node, modules):
        parts = whole.split(".")
        private = [number for number, part in enumerate(parts) if is_private(part)]
        if private and parts[0] != "drivetrain":
            end = private[-1] + (2 if parts[private[-1]] == "_C" else 1)
            yield ".".join(parts[:end])
        return
    part: ast.expr = node
    while isinstance(part, ast.Attribute):
        if is_private(part.attr):
            receiver = part.value
            of_self = isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")
            foreign = part.attr not in own or (part.attr in listed and not of_self)
            if foreign or _is_super(receiver):
                yield part.attr
        part = part.value


def _is_super(node: ast.expr) -> bool:
    """Return True for `super()`, whose private methods are another library's: classes of the
    project do not call those of each other."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _of_text(text: str, own: Collection[str]) -> Iterator[str]:
    if not NAMES.fullmatch(text):
        return
    if NODE.fullmatch(text) or (
        any(map(is_private, re.split("[.:]", text)))
        and not any(fnmatchcase(name, text) for name in own)
    ):
        yield text


def _pattern(node: ast.JoinedStr) -> str:
    """Return the text of an f-string, with `*` for each value."""
    parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
    return "".join(map(str, parts))


def own_names(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Folder of a room -> private names that its files bind."""
    found: dict[str, set[str]] = {}
    for path, text in files.items():
        if room := room_of(path):
            found.setdefault(room.folder, set()).update(bound(ast.parse(text, path)))
    return found
