"""Who may know of whom. The table is ROOMS in house_rules.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from house_rules import ROOMS, import_breaches, secret_breaches, sources


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room: str) -> None:
    folder = ROOMS[room].folder + "/"
    found = [line for path, text in sources(folder).items() for line in import_breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", [name for name, room in ROOMS.items() if room.secrets])
def test_a_room_names_no_backend(room: str) -> None:
    folder = ROOMS[room].folder + "/"
    found = [line for path, text in sources(folder).items() for line in secret_breaches(path, text)]
    assert not found, "\n".join(found)


def test_training_by_the_drop_in_without_a_tracker_does_not_import_transformers() -> None:
    script = """
import sys, tempfile
import torch
from drivetrain.compat import Trainer, TrainingArguments

class Net(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).square().mean()}

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(output_dir=folder, max_steps=1, use_cpu=True, report_to="none")
    data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    assert Trainer(model=Net(2, 1), args=args, train_dataset=data).train().global_step == 1
others = {"transformers", "accelerate", "peft", "bitsandbytes"}
assert not others & set(sys.modules), others & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/trainer/fit.py", "import numpy"),
        ("runtime/trainer/fit.py", "import torch.distributed as dist"),
        ("runtime/trainer/fit.py", "from torch import distributed"),
        ("runtime/trainer/fit.py", "from torch.cuda import synchronize"),
        ("runtime/trainer/fit.py", "import torch\ntorch.cuda.synchronize()"),
        ("runtime/trainer/fit.py", "from drivetrain.kernel import contract"),
        ("runtime/trainer/fit.py", "from ..backends import cpu"),
        ("runtime/trainer/fit.py", "from .. import backends"),
        ("runtime/checkpoint/store.py", "from ...backends import cpu"),
        ("kernel/__init__.py", "from ..cli import main"),
        (
            "runtime/trainer/fit.py",
            "import importlib\nimportlib.import_module('drivetrain.backends.cpu')",
        ),
        ("backends/ddp.py", "from ..kernel.loop import fit"),
        ("backends/ddp.py", "from ..kernel import fit"),
        ("backends/ddp.py", "from .cpu import driver"),
        ("backends/ddp.py", "from . import cpu"),
        ("backends/ddp.py", "from ..compat import Trainer"),
        ("backends/ddp.py", "def f():\n    import deepspeed"),
        ("backends/deepspeed/driver.py", "import deepspeed"),
        ("backends/xla/driver.py", "class A:\n    import torch_xla"),
        ("compat/trainer/trainer.py", "from ..backends.cpu import driver"),
        ("compat/trainer/trainer.py", "from ..conformance import cases"),
        ("runtime/cli/__init__.py", "from ..compat import Trainer"),
        ("runtime/cli/__init__.py", "from ..backends import cpu"),
        ("runtime/cli/__init__.py", "import tests.house"),
        ("runtime/cli/__init__.py", "from drivetrain.kernel.contract import Recipe"),
        ("runtime/cli/gpt.py", "from drivetrain.backends.cpu import driver"),
        ("runtime/checkpoint/storage/fsspec_storage.py", "import s3fs"),
        ("runtime/checkpoint/storage/fsspec_storage.py", "from ..kernel.loop import fit"),
        ("runtime/checkpoint/storage/protocol.py", "from ...storage import FsspecStorage"),
        ("tests/conformance/cases.py", "from ..backends import cpu"),
        ("tests/conformance/cases.py", "from drivetrain.cli import main"),
    ],
)
def test_a_bad_import_is_seen(path: str, line: str) -> None:
    assert import_breaches(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "runtime/trainer/fit.py",
            "import math, torch\nfrom torch import nn\nfrom . import contract",
        ),
        ("runtime/checkpoint/store.py", "from ..contract import Piece\nfrom .manifest import A"),
        ("kernel/__init__.py", "from .loop import fit\nfrom . import loop"),
        ("backends/ddp.py", "import torch.distributed as dist\nfrom ..kernel.contract import Plan"),
        ("backends/ddp.py", "from . import _step\nfrom ._model import build_model"),
        ("backends/deepspeed/driver.py", "def f():\n    from deepspeed.runtime import engine"),
        ("compat/trainer/trainer.py", "import transformers\nfrom ..kernel.loop import fit"),
        ("runtime/cli/gpt.py", "from drivetrain.kernel.contract import Recipe"),
        ("runtime/cli/__init__.py", "import typer\nfrom ..conformance import cases"),
        ("tests/conformance/cases.py", "from drivetrain.kernel import fit\nfrom .bench import A"),
        ("tests/kernel/test_loop.py", "import drivetrain.backends.cpu"),
    ],
)
def test_a_good_import_passes(path: str, line: str) -> None:
    assert not import_breaches(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/trainer/fit.py", "x = 'ddp'"),
        ("runtime/trainer/fit.py", "x = f'{1} needs NCCL'"),
        ("runtime/trainer/fit.py", "x = torch.device('cuda:0')"),
        ("runtime/trainer/fit.py", "x = {'torch_xla': 1}"),
        ("tests/conformance/cases.py", "if name == 'fsdp': pass"),
    ],
)
def test_a_backend_s_name_is_seen(path: str, line: str) -> None:
    assert secret_breaches(path, line)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/trainer/fit.py", "'''Not only for DDP.'''\nx = 1\n'''Nor for xla.'''"),
        ("runtime/trainer/fit.py", "x = torch.device('cpu')  # gloo"),
        ("runtime/trainer/fit.py", "x = 'barracuda, ddpx'"),
        ("kernel/registry.py", "x = {'ddp': 'ddp:driver'}"),
        ("backends/ddp.py", "x = 'ddp'"),
        ("tests/conformance/cases.py", "x = 'cuda'"),
    ],
)
def test_an_innocent_string_passes(path: str, line: str) -> None:
    assert not secret_breaches(path, line)


def test_the_kernel_loads_torch_and_the_standard_library_alone() -> None:
    script = """
import json, sys
import torch
before = set(sys.modules)
import drivetrain.kernel
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    allowed = sys.stdlib_module_names | {"drivetrain", "torch"}
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "drivetrain.kernel" in loaded
    assert [name for name in loaded if name.partition(".")[0] not in allowed] == []
    strangers = ("drivetrain.backends", "drivetrain.cli", "drivetrain.compat")
    assert [name for name in loaded if name.startswith(strangers)] == []
