"""Writes compat_usage.json: what other libraries use of Hugging Face's Trainer and of accelerate.

    python docs/compat_usage.py NAME_OR_FOLDER...

Each is a package that is installed, or the folder of one that was unpacked (`pip download`, then
unzip). Sources are read, and nothing of them is run; transformers and accelerate, whose members
count, are imported. A test holds `drivetrain.compat` to the list.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("compat_usage.json")

SPOKEN = {
    "Trainer": ("trainer", "self.trainer", "hf_trainer"),
    "TrainingArguments": (
        "args",
        "training_args",
        "self.args",
        "trainer.args",
        "self.trainer.args",
    ),
    "TrainerState": ("state", "self.state", "trainer.state", "self.trainer.state"),
    "TrainerControl": ("control", "self.control", "trainer.control"),
    "CallbackHandler": ("self.callback_handler", "trainer.callback_handler"),
    "Accelerator": ("accelerator", "self.accelerator", "trainer.accelerator"),
    "AcceleratorState": ("accelerator.state", "self.accelerator.state"),
    "GradientState": ("accelerator.gradient_state", "self.accelerator.gradient_state"),
}
"""Names by which code calls an object of each class."""
DERIVED = {"Trainer": r"Trainer\b", "TrainingArguments": r"(TrainingArguments|Config)\b"}
"""Base class -> pattern of names of bases; `self` of a class with such a base counts as the base
class.
"""


def theirs() -> dict[str, Any]:
    """The classes themselves."""
    import accelerate
    import transformers
    from accelerate.state import AcceleratorState, GradientState
    from transformers.trainer_callback import CallbackHandler

    return {
        "Trainer": transformers.Seq2SeqTrainer,
        "TrainingArguments": transformers.Seq2SeqTrainingArguments,
        "TrainerState": transformers.TrainerState,
        "TrainerControl": transformers.TrainerControl,
        "TrainerCallback": transformers.TrainerCallback,
        "CallbackHandler": CallbackHandler,
        "Accelerator": accelerate.Accelerator,
        "AcceleratorState": AcceleratorState,
        "GradientState": GradientState,
    }


def members(kind: type) -> set[str]:
    """Names of a class and of what its methods set on `self`; without `__special__` ones."""
    found = set(dir(kind))
    for base in kind.__mro__[:-1]:
        try:
            tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
        found |= set(getattr(base, "__annotations__", {}))
    return {name for name in found if not name.startswith("__")}


@dataclass
class Uses:
    """Members that one library uses, by class."""

    known: dict[str, set[str]]
    found: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def read(self, tree: ast.AST) -> None:
        """Add the members that a module uses."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                spoken = ast.unparse(node.value)
                for kind, names in SPOKEN.items():
                    if spoken in names:
                        self._add(kind, node.attr)
            elif isinstance(node, ast.ClassDef):
                self._read_class(node)
            elif isinstance(node, ast.Call):
                self._read_call(node)

    def _read_class(self, node: ast.ClassDef) -> None:
        bases = " ".join(ast.unparse(base) for base in node.bases)
        if "Callback" in bases:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    self._add("TrainerCallback", method.name)
        for kind, word in DERIVED.items():
            if re.search(word, bases):
                for name in _of_self(node):
                    self._add(kind, name)

    def _read_call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        if called.endswith("TrainingArguments"):
            for keyword in node.keywords:
                self._add("TrainingArguments", keyword.arg or "")

    def _add(self, kind: str, name: str) -> None:
        if name in self.known[kind]:
            self.found[kind].add(name)


def _of_self(node: ast.ClassDef) -> Iterator[str]:
    """Yield the methods of a class, and the attributes that its body reads or sets on `self` and
    `super()`.
    """
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) in ("self", "super()"):
            yield inner.attr


def folder_of(name: str) -> Path:
    """A folder as given, or that of an installed package."""
    if Path(name).is_dir():
        return Path(name)
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is neither a folder nor an installed package")
    return Path(spec.origin).parent


def version_of(folder: Path) -> str:
    """Return a package's version from the metadata beside it."""
    for info in folder.parent.glob("*.dist-info"):
        name, _, number = info.name.removesuffix(".dist-info").rpartition("-")
        if name.lower() == folder.name.lower():
            return number
    return "unknown"


def listed(names: list[str]) -> dict[str, Any]:
    """The whole list: by class and member, the libraries that use it."""
    known = {kind: members(cls) for kind, cls in theirs().items()}
    uses: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in known}
    versions = {name: version(name) for name in ("transformers", "accelerate")}
    for folder in map(folder_of, names):
        found = Uses(known)
        for path in sorted(folder.rglob("*.py")):
            found.read(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        versions[folder.name] = version_of(folder)
        for kind, each in found.found.items():
            for name in each:
                uses[kind][name].append(folder.name)
    return {
        "versions": versions,
        "uses": {
            kind: {name: " ".join(sorted(each[name])) for name in sorted(each)}
            for kind, each in uses.items()
        },
    }


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    LIST.write_text(json.dumps(listed(sys.argv[1:]), indent=1) + "\n", encoding="utf-8")
