"""Private names of other libraries: each use is listed in `private_interfaces.json`, with a reason.

An entry has the owner (`of`), its `names`, the `files` that use them, `why`, the oldest version
that was looked at and has them (`since`), and when the entry can go (`until`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from house_rules import ROOT, room_of, sources
from private_uses import Use, at_import, own_names, uses
from programs import program

from drivetrain.data.private_names import TRIED

LIST = ROOT / "tests" / "house" / "private_interfaces.json"
FIELDS = ["of", "names", "files", "why", "since", "until"]

Entry = dict[str, Any]


def entries() -> list[Entry]:
    found: list[Entry] = json.loads(LIST.read_text())
    return found


def last(name: str) -> str:
    return name.rpartition(".")[2]


def fits(entry: Entry, name: str, use: Use) -> bool:
    """Return True if a name of the entry is the one used, in a file that the entry has. Of an
    object, the source shows the last part of the name alone."""
    if use.path not in entry["files"]:
        return False
    return use.name in (f"{entry['of']}.{name}", last(name))


def all_uses(listed: list[Entry]) -> list[Use]:
    files = {path: text for path, text in sources().items() if room_of(path)}
    own, names = own_names(files), {last(name) for entry in listed for name in entry["names"]}
    rooms = {path: room for path in files if (room := room_of(path))}
    return [
        use
        for path, text in files.items()
        for use in uses(path, text, own[rooms[path].folder], names)
    ]


def complaints(listed: list[Entry], found: list[Use]) -> list[str]:
    missing = [
        f"{use.path}:{use.line}: {use.name} is not in {LIST.name}"
        for use in found
        if not any(fits(entry, name, use) for entry in listed for name in entry["names"])
    ]
    for entry in listed:
        used = [(use, name) for use in found for name in entry["names"] if fits(entry, name, use)]
        names, files = {name for _, name in used}, {use.path for use, _ in used}
        missing += [f"nothing uses {entry['of']}.{n}" for n in entry["names"] if n not in names]
        missing += [f"{f} uses nothing of {entry['of']}" for f in entry["files"] if f not in files]
    return missing


def test_each_private_name_is_listed_and_each_entry_is_used() -> None:
    listed = entries()
    assert complaints(listed, all_uses(listed)) == []


def test_entries_are_complete() -> None:
    for entry in entries():
        assert [*entry] == FIELDS
        assert all(entry.values()), entry
        assert entry["names"] == sorted(set(entry["names"]))
        assert entry["files"] == sorted(set(entry["files"]))


def test_nothing_private_is_looked_up_by_an_import() -> None:
    found = [
        use for path, text in sources().items() if room_of(path) for use in at_import(path, text)
    ]
    assert found == [], "look it up in a function, or by drivetrain.data.private_names"


def test_the_page_is_what_the_list_says() -> None:
    page = program("private_interfaces")
    assert page.PAGE.read_text() == page.page(), "run: python docs/generate.py private-interfaces"


def test_the_versions_in_messages_are_those_that_were_tried() -> None:
    record = json.loads((ROOT / "docs" / "compatibility.json").read_text())
    tried = {
        tuple(map(int, entry["torch"].split(".")[:2]))
        for kinds in record.values()
        for entry in kinds.values()
        if "torch" in entry
    }
    assert tuple(".".join(map(str, version)) for version in (min(tried), max(tried))) == TRIED


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from torch._dynamo import config", ["torch._dynamo.config"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch\ntorch._C.x.y()", ["torch._C.x"]),
        ("import torch.distributed as dist\ndist._x()", ["torch.distributed._x"]),
        ("def f(loader):\n    loader._workers[0]._popen", ["_workers", "_popen"]),
        ("def f(x):\n    getattr(x, '_y')", ["_y"]),
        ("def f(x, kind):\n    getattr(x, f'_keys_{kind}')", ["_keys_*"]),
        ("def f(x):\n    x(_y=1)", ["_y"]),
        ("class A(B):\n    def _own(self):\n        return super()._own()", ["_own"]),
        ("class A(B):\n    def f(self):\n        self._theirs()", ["_theirs"]),
        ("def f(node):\n    return node.name() == 'ViewBackward0'", ["ViewBackward0"]),
        ("class A:\n    def f(self):\n        self._own = self._own", []),
        ("from ..common import x\nfrom . import _y", []),
        ("import os, sys\nos._exit(sys._getframe())", []),
        ("def f(x):\n    'uses _y of torch'\n    x.__dict__['a_b']", []),
    ],
)
def test_uses_are_seen(text: str, names: list[str]) -> None:
    files = {"runtime/data/x.py": text}
    own = own_names(files)["runtime/data"]
    assert sorted(use.name for use in uses("runtime/data/x.py", text, own)) == sorted(names)


def test_a_listed_name_is_own_on_self_alone() -> None:
    text = "def f(self, loader):\n    self._workers = loader._workers"
    own = own_names({"runtime/data/x.py": text})["runtime/data"]
    assert uses("runtime/data/x.py", text, own) == []
    assert [u.name for u in uses("runtime/data/x.py", text, own, {"_workers"})] == ["_workers"]


def test_a_name_without_an_entry_and_an_entry_without_a_use_are_seen() -> None:
    listed = [{"of": "torch", "names": ["_a", "_b"], "files": ["runtime/x.py", "runtime/y.py"]}]
    found = [Use("runtime/x.py", 1, "torch._a"), Use("runtime/y.py", 2, "torch.nn._b")]
    assert complaints(listed, found) == [
        "runtime/y.py:2: torch.nn._b is not in private_interfaces.json",
        "nothing uses torch._b",
        "runtime/y.py uses nothing of torch",
    ]


def test_a_name_at_import_is_seen() -> None:
    text = "import torch\nfrom torch._a import b\nX = torch._c\ndef f():\n    return torch._d"
    assert [use.name for use in at_import("runtime/x.py", text)] == ["torch._a.b", "torch._c"]


WITHOUT_NAMES = """
import importlib
import torch
import torch._dynamo, torch.optim, torch.utils.data

batches = iter(torch.utils.data.DataLoader([1, 2]))  # torch itself uses the names, too
for module, names in {names!r}.items():
    for name in names.split():
        delattr(importlib.import_module(module), name)

import drivetrain.backends.common.buffers
import drivetrain.backends.common.optimizer_step
import drivetrain.backends.fsdp.dtensor
import drivetrain.backends.fsdp.driver
import drivetrain.backends.xla.placing
import drivetrain.compat.data.sharding
import drivetrain.conformance.worker
import drivetrain.trainer.optimizers
import drivetrain.data.workers
from drivetrain.kernel.errors import LibraryUnsupported

tensor = torch.zeros(2)
drivetrain.backends.common.buffers.write_unseen([tensor], [torch.ones(2)])
assert tensor.tolist() == [1, 1] and tensor._version == 0

weight = torch.nn.Parameter(torch.ones(1))
weight.grad = torch.ones(1)
drivetrain.backends.common.optimizer_step.take_step(torch.optim.SGD([weight], lr=0.5))
assert weight.item() == 0.5
assert not drivetrain.trainer.optimizers._can_fuse([weight])

from drivetrain.backends.fsdp import whole
assert whole._states_of_modules() == {{}}

assert len(list(drivetrain.compat.data.sharding._quick(batches))) == 2

try:
    drivetrain.data.killed_workers.detach_death_handler(batches)
except LibraryUnsupported as error:
    print(error)
"""
REMOVED = {
    "torch.autograd.grad_mode": "_unsafe_preserve_version_counter",
    "torch.autograd.profiler": "_is_profiler_enabled",
    "torch.distributed._composable_state": "_module_state_mapping",
    "torch.nn.modules.batchnorm": "_NormBase",
    "torch.nn.modules.instancenorm": "_InstanceNorm",
    "torch.optim": "Adadelta",
    "torch.utils._foreach_utils": "_get_fused_kernels_supported_devices",
    "torch.utils.data._utils.signal_handling": "_remove_worker_pids",
    "torch.utils.data.dataloader": "_SingleProcessDataLoaderIter",
}


def test_a_torch_without_these_names_is_imported_and_used() -> None:
    program = WITHOUT_NAMES.format(names=REMOVED)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has no torch.utils.data._utils.signal_handling._remove_worker_pids" in done.stdout
    assert "torch 2.8 to 2.15" in done.stdout
    assert "cannot be trained by it again" in done.stderr
